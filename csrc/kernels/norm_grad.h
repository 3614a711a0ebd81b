#ifndef TE_JAX_KERNELS_NORM_GRAD_H_
#define TE_JAX_KERNELS_NORM_GRAD_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Bytes of device memory that the launch below needs as workspace, aligned to 16 bytes.
size_t NormGradWorkspaceBytes(const NormGradArgs& args);

// Queues dx = the gradient of the norm (+ dres), and dgamma and dbeta, summed in an order that depends on the shape and
// the GPU's number of multiprocessors alone. Arguments are checked already; returns the launch error.
cudaError_t LaunchNormGrad(const NormGradArgs& args, void* workspace, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_NORM_GRAD_H_
