// What is done with accumulators: scaled and added to the sums, and these written with alpha, beta, c and bias.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_

#include <cuda_bf16.h>

#include <type_traits>

#include "csrc/kernels/block_gemm_config.cuh"

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

// Two neighbouring values, in fp32.
__device__ inline float2 Pair(const float* values) { return *reinterpret_cast<const float2*>(values); }
__device__ inline float2 Pair(const __nv_bfloat16* values) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(values));
}

// sums = alpha * sums + beta * c + bias, for one wave. In place this has to come before WriteWave: another lane of the
// four writes what this one reads of c.
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

// Writes one wave: a thread has columns 2 * (lane % 4) and + 1 of each group of 8, in rows `row` and `row` + 8. Four
// neighbouring lanes exchange pairs so that each writes 16 bytes, and no shared memory is needed.
template <class Config>
__device__ inline void WriteWave(const float (&sums)[Config::kN / 2], const BlockGemmParams& p, int row, int column,
                                 int lane) {
  const int quad = lane % 4;
  if constexpr (std::is_same_v<typename Config::Out, float>) {
    float* out = static_cast<float*>(p.out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
#pragma unroll
      for (int j = 0; j < Config::kN / 8; ++j) {
        const int c = column + 8 * j + 2 * quad;
        if (r < p.m && c < p.n)
          *reinterpret_cast<float2*>(out + int64_t{r} * p.n + c) =
              make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      }
    }
  } else {
    auto* out = static_cast<__nv_bfloat16*>(p.out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
#pragma unroll
      for (int j = 0; j < Config::kN / 8; j += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat162 pair =
              __floats2bfloat162_rn(sums[4 * (j + i) + 2 * half], sums[4 * (j + i) + 2 * half + 1]);
          v[i] = reinterpret_cast<const uint32_t&>(pair);
        }
        // The transpose of the 4 x 4 matrix [lane of the quad, group].
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const bool upper = quad & step;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i + step], step);
            if (upper) v[i] = received;
            else v[i + step] = received;
          }
        }
        const int c = column + 8 * (j + quad);
        if (r < p.m && c < p.n)
          *reinterpret_cast<uint4*>(out + int64_t{r} * p.n + c) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_
