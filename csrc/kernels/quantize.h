#ifndef TE_JAX_KERNELS_QUANTIZE_H_
#define TE_JAX_KERNELS_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Bytes of device memory that the launch below needs as workspace, aligned to 16 bytes.
size_t QuantizeWorkspaceBytes(const QuantizeArgs& args);

// Queues the pass over y = x.
// Arguments are checked already; returns the launch error.
cudaError_t LaunchQuantize(const QuantizeArgs& args, void* workspace, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_QUANTIZE_H_
