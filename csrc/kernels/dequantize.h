#ifndef TE_JAX_KERNELS_DEQUANTIZE_H_
#define TE_JAX_KERNELS_DEQUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Queues out = float32(data) * scale_inv, rounded to out_dtype.
// Arguments are checked already; returns the launch error.
cudaError_t LaunchDequantize(const DequantizeArgs& args, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_DEQUANTIZE_H_
