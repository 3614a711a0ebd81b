// What a thread has of an accumulator of wgmma, [64, N] for a warpgroup: of each group of 8 columns, columns
// 2 * (lane % 4) and + 1, in rows 16 * warp + lane / 4 and + 8. values[4 * group + 2 * lower row + column].
#ifndef TE_JAX_KERNELS_FRAGMENT_CUH_
#define TE_JAX_KERNELS_FRAGMENT_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace te_jax::kernels {

// Two neighbouring values, in fp32.
__device__ inline float2 Pair(const float* values) { return *reinterpret_cast<const float2*>(values); }
__device__ inline float2 Pair(const __nv_bfloat16* values) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(values));
}

// Where a thread writes its values: its upper row and the first column of the tile, in a matrix of which `row_end` rows
// and `column_end` columns may be written, with `pitch` elements from row to row.
struct FragmentPlace {
  int row, row_end, column, column_end, pitch;
};

// Writes values to out. Four neighbouring lanes exchange 16-bit results so that each writes 16 bytes, and no shared
// memory is needed. All lanes of a warp call it.
template <class Out, int kCount>
__device__ inline void WriteFragment(const float (&values)[kCount], Out* out, const FragmentPlace& at, int lane) {
  constexpr int kGroups = kCount / 4;
  const int quad = lane % 4;
  if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = at.row + 8 * half;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int c = at.column + 8 * j + 2 * quad;
        if (r < at.row_end && c < at.column_end)
          *reinterpret_cast<float2*>(out + int64_t{r} * at.pitch + c) =
              make_float2(values[4 * j + 2 * half], values[4 * j + 2 * half + 1]);
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = at.row + 8 * half;
#pragma unroll
      for (int j = 0; j < kGroups; j += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat162 pair =
              __floats2bfloat162_rn(values[4 * (j + i) + 2 * half], values[4 * (j + i) + 2 * half + 1]);
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
        const int c = at.column + 8 * (j + quad);
        if (r < at.row_end && c < at.column_end)
          *reinterpret_cast<uint4*>(out + int64_t{r} * at.pitch + c) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_FRAGMENT_CUH_
