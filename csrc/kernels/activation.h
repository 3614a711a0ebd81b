#ifndef TE_JAX_KERNELS_ACTIVATION_H_
#define TE_JAX_KERNELS_ACTIVATION_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Bytes of device memory that the launch below needs as workspace, aligned to 16 bytes.
size_t ActivationWorkspaceBytes(const ActivationArgs& args);

// Queues the pass over y = act(x), or act(x[:, :cols]) * x[:, cols:] if gated.
// Arguments are checked already; returns the launch error.
cudaError_t LaunchActivation(const ActivationArgs& args, void* workspace, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_ACTIVATION_H_
