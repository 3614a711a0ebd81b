// What is done with accumulators: scaled and added to the sums, and these written with alpha, beta, c and bias.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_

#include <cuda_bf16.h>

#include "csrc/kernels/block_gemm_config.cuh"
#include "csrc/kernels/fragment.cuh"

namespace te_jax::kernels {

// Factors of one thread's accumulators: rows lane / 4 and + 8 of each wave, and of a 128 x 128 scaled b the columns.
template <class Config>
struct BlockFactors {
  float rows[Config::kWaves][2];
  float columns;
};

// sums += partial * factors. `columns` are the columns' factors of a 1 x 128 scaled b.
template <class Config>
__device__ inline void Promote(float (&sums)[Config::kN / 2], const float (&partial)[Config::kN / 2],
                               const BlockFactors<Config>& factors, int wave, const float* columns) {
  if constexpr (Config::kVectorB) {
    const float low = factors.rows[wave][0], high = factors.rows[wave][1];
#pragma unroll
    for (int j = 0; j < Config::kN / 8; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(columns + 8 * j);
      sums[4 * j] += partial[4 * j] * low * b.x;
      sums[4 * j + 1] += partial[4 * j + 1] * low * b.y;
      sums[4 * j + 2] += partial[4 * j + 2] * high * b.x;
      sums[4 * j + 3] += partial[4 * j + 3] * high * b.y;
    }
  } else {
    const float low = factors.rows[wave][0] * factors.columns, high = factors.rows[wave][1] * factors.columns;
#pragma unroll
    for (int j = 0; j < Config::kN / 8; ++j) {
      sums[4 * j] += partial[4 * j] * low;
      sums[4 * j + 1] += partial[4 * j + 1] * low;
      sums[4 * j + 2] += partial[4 * j + 2] * high;
      sums[4 * j + 3] += partial[4 * j + 3] * high;
    }
  }
}

// sums = alpha * sums + beta * c + bias, for one wave. In place this has to come before WriteFragment: another lane
// of the four writes what this one reads of c.
template <class Config>
__device__ inline void Finish(float (&sums)[Config::kN / 2], const BlockGemmParams& p, int row, int column, int lane) {
  const int first = column + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < Config::kN / 2; ++i) sums[i] *= p.alpha;
  if (p.c != nullptr) {
    const auto* c = static_cast<const typename Config::Out*>(p.c) + first;
#pragma unroll
    for (int i = 0; i < Config::kN / 4; ++i) {  // 8 columns to the right with each, the rows below after the upper ones
      if (i % 8 == 0) asm volatile("" ::: "memory");  // not more loads at a time than there are registers for
      const int j = i % (Config::kN / 8), half = i / (Config::kN / 8), r = row + 8 * half;
      if (r >= p.m || first + 8 * j >= p.n) continue;
      const float2 add = Pair(c + int64_t{r} * p.n + 8 * j);
      sums[4 * j + 2 * half] += p.beta * add.x;
      sums[4 * j + 2 * half + 1] += p.beta * add.y;
    }
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < Config::kN / 8; ++j) {
      if (first + 8 * j >= p.n) continue;
      const float2 add = Pair(p.bias + first + 8 * j);
      sums[4 * j] += add.x;
      sums[4 * j + 1] += add.y;
      sums[4 * j + 2] += add.x;
      sums[4 * j + 3] += add.y;
    }
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_
