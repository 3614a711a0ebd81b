#ifndef TE_JAX_KERNELS_NORM_H_
#define TE_JAX_KERNELS_NORM_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Bytes of device memory that the launch below needs as workspace, aligned to 16 bytes.
size_t NormWorkspaceBytes(const NormArgs& args);

// Queues mean and rstd, then the pass over y = (x - mean) * rstd * gamma + beta (RMSNorm: mean 0, no beta).
// Arguments are checked already; returns the launch error.
cudaError_t LaunchNorm(const NormArgs& args, void* workspace, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_NORM_H_
