#ifndef TE_JAX_KERNELS_RANDOM_H_
#define TE_JAX_KERNELS_RANDOM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Fills values [size] with pseudo-random numbers that look like a quantized tensor's: roughly normal, up to most of the
// format's range in FP8, of standard deviation 1 otherwise. The same for the same seed. For timing, not for statistics.
cudaError_t LaunchRandom(void* values, DType dtype, int64_t size, uint32_t seed, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_RANDOM_H_
