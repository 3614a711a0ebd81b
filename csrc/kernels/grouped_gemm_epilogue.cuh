// What is done with the sums of a tile: scaled, c and bias added, and written.
#ifndef TE_JAX_KERNELS_GROUPED_GEMM_EPILOGUE_CUH_
#define TE_JAX_KERNELS_GROUPED_GEMM_EPILOGUE_CUH_

#include "csrc/kernels/fragment.cuh"
#include "csrc/kernels/grouped_gemm_config.cuh"

namespace te_jax::kernels {

template <class T, int kCount>
__device__ inline void AddBias(float (&sums)[kCount], const T* bias, const FragmentPlace& at, int lane) {
  const int first = at.column + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    if (first + 8 * j >= at.column_end) continue;
    const float2 add = Pair(bias + first + 8 * j);
    sums[4 * j] += add.x;
    sums[4 * j + 1] += add.y;
    sums[4 * j + 2] += add.x;
    sums[4 * j + 3] += add.y;
  }
}

// In place this has to come before WriteFragment: another lane of the four writes what this one reads of c.
template <class Out, int kCount>
__device__ inline void AddC(float (&sums)[kCount], const Out* c, const FragmentPlace& at, int lane) {
  const int first = at.column + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {  // 8 columns to the right with each, the rows below after the upper ones
    if (i % 8 == 0) asm volatile("" ::: "memory");  // not more loads at a time than there are registers for
    const int j = i % (kCount / 4), half = i / (kCount / 4), row = at.row + 8 * half;
    if (row >= at.row_end || first + 8 * j >= at.column_end) continue;
    const float2 add = Pair(c + int64_t{row} * at.pitch + first + 8 * j);
    sums[4 * j + 2 * half] += add.x;
    sums[4 * j + 2 * half + 1] += add.y;
  }
}

template <class Config, class Out>
__device__ inline void FinishAs(float (&sums)[Config::kN / 2], const GroupedParams& p, const GroupedTile& tile,
                                const FragmentPlace& at, int lane) {
  int64_t offset = 0;
  if constexpr (Config::kRagged == Ragged::kContraction) {
    offset = int64_t{tile.group} * p.m * p.n;
    if (p.c != nullptr) AddC(sums, static_cast<const Out*>(p.c) + offset, at, lane);
  }
  WriteFragment(sums, static_cast<Out*>(p.out) + offset, at, lane);
}

// `warp_row`: the first row of this warp in the tile.
template <class Config>
__device__ inline void Finish(float (&sums)[Config::kN / 2], const GroupedParams& p, const GroupedTile& tile,
                              int warp_row) {
  if (tile.row + warp_row >= tile.row_end) return;
  const int lane = threadIdx.x % kWarp;
  const FragmentPlace at{tile.row + warp_row + lane / 4, tile.row_end, tile.column, p.n, p.n};
  if (tile.group < p.groups) {  // else they stay 0
    if constexpr (!Config::kBF16) {
      const float scale = p.scale_a[tile.group * p.scale_a_stride] * p.scale_b[tile.group * p.scale_b_stride];
#pragma unroll
      for (int i = 0; i < Config::kN / 2; ++i) sums[i] *= scale;
    }
    if (p.bias != nullptr) {
      const int64_t offset = int64_t{tile.group} * p.n;
      if (p.bias_f32) AddBias(sums, static_cast<const float*>(p.bias) + offset, at, lane);
      else AddBias(sums, static_cast<const __nv_bfloat16*>(p.bias) + offset, at, lane);
    }
  }
  if (p.out_f32) FinishAs<Config, float>(sums, p, tile, at, lane);
  else FinishAs<Config, __nv_bfloat16>(sums, p, tile, at, lane);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_EPILOGUE_CUH_
