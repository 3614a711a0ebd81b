#ifndef TE_JAX_KERNELS_GROUPED_QUANTIZE_H_
#define TE_JAX_KERNELS_GROUPED_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "csrc/core/grouped_args.h"

namespace te_jax::kernels {

// Bytes of device memory that the launch below needs as workspace, aligned to 16 bytes.
size_t GroupedQuantizeWorkspaceBytes(const GroupedQuantizeArgs& args);

// Queues the pass. Arguments are checked already (at most kMaxGroups groups); returns the launch error.
cudaError_t LaunchGroupedQuantize(const GroupedQuantizeArgs& args, void* workspace, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_QUANTIZE_H_
