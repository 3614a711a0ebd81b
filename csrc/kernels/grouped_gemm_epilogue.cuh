// What is done with the sums of a tile: scaled, bias added, and written.
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

// The sums of rows of no group stay 0.
template <class Config>
__device__ inline void Scale(float (&sums)[Config::kN / 2], const GroupedParams& p, const GroupedTile& tile) {
  if constexpr (!Config::kBF16) {
    if (tile.group >= p.groups) return;
    const float scale = p.scale_a[tile.group * p.scale_a_stride] * p.scale_b[tile.group * p.scale_b_stride];
#pragma unroll
    for (int i = 0; i < Config::kN / 2; ++i) sums[i] *= scale;
  }
}

// `warp_row`: the first row of this warp in the tile.
template <class Config>
__device__ inline void Finish(float (&sums)[Config::kN / 2], const GroupedParams& p, const GroupedTile& tile,
                              int warp_row) {
  if (tile.row + warp_row >= tile.row_end) return;
  const int lane = threadIdx.x % kWarp;
  const FragmentPlace at{tile.row + warp_row + lane / 4, tile.row_end, tile.column, p.n, p.n};
  if (p.bias != nullptr && tile.group < p.groups) {
    const int64_t offset = int64_t{tile.group} * p.n;
    if (p.bias_f32) AddBias(sums, static_cast<const float*>(p.bias) + offset, at, lane);
    else AddBias(sums, static_cast<const __nv_bfloat16*>(p.bias) + offset, at, lane);
  }
  const int64_t offset = Config::kRagged == Ragged::kContraction ? int64_t{tile.group} * p.m * p.n : 0;
  if (p.out_f32) WriteFragment(sums, static_cast<float*>(p.out) + offset, at, lane);
  else WriteFragment(sums, static_cast<__nv_bfloat16*>(p.out) + offset, at, lane);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_EPILOGUE_CUH_
