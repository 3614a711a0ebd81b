// Reductions over a warp and a block whose order is fixed, so that results repeat bit for bit.
#ifndef TE_JAX_KERNELS_REDUCE_CUH_
#define TE_JAX_KERNELS_REDUCE_CUH_

#include <cstdint>

namespace te_jax::kernels {

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

__device__ inline float WarpSum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

// The maximum over the block, for all its threads. `scratch` holds one word per warp. Every thread must call it.
template <int kThreads>
__device__ inline uint32_t BlockMax(uint32_t value, uint32_t* scratch) {
  value = __reduce_max_sync(kFullMask, value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) value = max(value, scratch[i]);
  __syncthreads();  // scratch may be written again
  return value;
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_REDUCE_CUH_
