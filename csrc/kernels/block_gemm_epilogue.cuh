// What is done with accumulators: scaled and added to the sums, and written.
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

// Of a 1 x 128 scaled b, the first pairs of column factors of a thread: columns 2 * (lane % 4) and + 1 of groups of 8.
template <class Config>
struct ColumnsAhead {
  float2 pairs[Config::kAhead > 0 ? Config::kAhead : 1];

  __device__ void Read(const float* columns) {
#pragma unroll
    for (int j = 0; j < Config::kAhead; ++j) pairs[j] = *reinterpret_cast<const float2*>(columns + 8 * j);
  }
};

// sums += partial * factors. `columns` are the columns' factors of a 1 x 128 scaled b.
template <class Config>
__device__ inline void Promote(float (&sums)[Config::kN / 2], const float (&partial)[Config::kN / 2],
                               const BlockFactors<Config>& factors, int wave, const float* columns,
                               const ColumnsAhead<Config>& ahead) {
  if constexpr (Config::kVectorB) {
    const float low = factors.rows[wave][0], high = factors.rows[wave][1];
#pragma unroll
    for (int j = 0; j < Config::kN / 8; ++j) {
      const float2 b = j < Config::kAhead ? ahead.pairs[j] : *reinterpret_cast<const float2*>(columns + 8 * j);
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
          *reinterpret_cast<float2*>(out + r * p.ld_out + c) =
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
          *reinterpret_cast<uint4*>(out + r * p.ld_out + c) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_EPILOGUE_CUH_
