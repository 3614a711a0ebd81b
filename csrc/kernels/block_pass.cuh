// The end of a quantizing pass in block scaling: every block of y is cast with the scale of its own amax. One read of
// the operands, one write of each result, in tiles of 128 x 128, so that a block of each kind lies in one tile:
//
//   data   1x128 blocks along the columns: 16 lanes of a warp hold one
//   data_t 1x128 blocks along the rows of a group (QuantizedOut), cast again with their own scales; transposed in shared
//          memory
//   both   128x128 blocks: one scale for the tile
//
// y comes from the loaders of quantizing_pass.cuh and stays in registers, in its own dtype, until all amaxes are known.
#ifndef TE_JAX_KERNELS_BLOCK_PASS_CUH_
#define TE_JAX_KERNELS_BLOCK_PASS_CUH_

#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {

constexpr int kSide = 128;
constexpr int kBlockThreads = 512;  // 4 rows x 8 columns a thread, as in quantizing_pass.cuh
constexpr int kBlockWarps = kBlockThreads / kWarp;
constexpr int kLanesPerRow = kSide / kChunk;  // 16: a warp has two groups of 4 rows
static_assert(kBlockThreads * kRowsPerThread * kChunk == kSide * kSide && kSide == kBlock);

struct BlockParams {
  int64_t rows, cols;  // of one plane
  int64_t group_rows, tiles_per_group, padded_rows;
  float format_max;
  bool power_of_two, e5m2;
  void* hp;
  uint8_t* data;
  uint8_t* data_t;
  float *scale_inv, *scale_inv_t;
  float* tile_sums;  // [row tiles, planes * cols], or null
};

struct ScalePair {
  float scale, inverse;
};

// ScaleFromAmax and its inverse. Powers of two without a division: fp8_max is 1.75 * 2^n in both formats, so that the
// floor of fp8_max / amax is a matter of exponents, and of the mantissa of amax being above 1.75.
__device__ inline ScalePair BlockScale(float amax, const BlockParams& params) {
  if (!params.power_of_two) {
    const float scale = ScaleFromAmax(amax, params.format_max, /*margin=*/0, /*power_of_two=*/false);
    return {scale, __fdiv_rn(1.0f, scale)};
  }
  const uint32_t bits = __float_as_uint(amax);
  if (bits == 0 || bits >= kInfinityBits) return {1.0f, 1.0f};
  const int exponent = static_cast<int>(bits >> 23), max_exponent = params.e5m2 ? 15 : 8;
  const int above = (bits & 0x7fffffu) > 0x600000u;
  const int biased = min(127 + max_exponent - (exponent - 127) - above, 253);  // at most 2^126
  return {__uint_as_float(static_cast<uint32_t>(biased) << 23),
          __uint_as_float(static_cast<uint32_t>(254 - biased) << 23)};
}

// The place of this thread in a tile.
struct BlockPlace {
  int chunk, group;  // of 16 chunks, of 32 groups of 4 rows
  int64_t row_tile, col_tile, row, col, row_end;
  __device__ BlockPlace(int64_t index, const BlockParams& params) {
    const int64_t tiles_per_row = (params.cols + kSide - 1) / kSide;
    chunk = threadIdx.x % kLanesPerRow;
    group = threadIdx.x / kLanesPerRow;
    row_tile = index / tiles_per_row;
    col_tile = index % tiles_per_row;
    const int64_t group_start = row_tile / params.tiles_per_group * params.group_rows;
    row = group_start + row_tile % params.tiles_per_group * kSide + kRowsPerThread * group;
    row_end = group_start + params.group_rows;
    col = col_tile * kSide + kChunk * chunk;
  }
};

// A tile [columns][rows] of bytes. A word of 4 rows lies in 16-byte unit (row / 16) ^ (chunk % 8) of its column, and in
// the upper 8 chunks in the other half of the unit: no bank conflicts for the stores of a warp (16 chunks of 8 rows),
// nor for 16-byte reads along a column.
using BlockTile = uint32_t[kSide][kSide / 4];

__device__ inline void StoreTransposed(const uint32_t (&words)[kRowsPerThread][kWords], const BlockPlace& at,
                                       BlockTile& tile) {
  const int slot = ((at.group / 4) ^ (at.chunk % 8)) * 4 + ((at.group % 4) ^ (at.chunk / 8 * 2));
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const uint32_t low01 = __byte_perm(words[0][j], words[1][j], 0x5140);  // r0c0 r1c0 r0c1 r1c1
    const uint32_t low23 = __byte_perm(words[2][j], words[3][j], 0x5140);
    const uint32_t high01 = __byte_perm(words[0][j], words[1][j], 0x7362);  // r0c2 r1c2 r0c3 r1c3
    const uint32_t high23 = __byte_perm(words[2][j], words[3][j], 0x7362);
    const int column = at.chunk * kChunk + 4 * j;
    tile[column][slot] = __byte_perm(low01, low23, 0x5410);
    tile[column + 1][slot] = __byte_perm(low01, low23, 0x7632);
    tile[column + 2][slot] = __byte_perm(high01, high23, 0x5410);
    tile[column + 3][slot] = __byte_perm(high01, high23, 0x7632);
  }
}

// Writes the tile's columns as rows of data_t [cols, row_length], from `first_row` on, up to row_length.
__device__ inline void WriteTransposed(const BlockTile& tile, int64_t tile_col, int64_t cols, int64_t first_row,
                                       int64_t row_length, uint8_t* data_t) {
  constexpr int kUnits = kSide / kUnit;
  const int unit = threadIdx.x % kUnits;
  const int64_t row = first_row + unit * kUnit;
#pragma unroll
  for (int column = threadIdx.x / kUnits; column < kSide; column += kBlockThreads / kUnits) {
    if (tile_col + column >= cols || row >= row_length) continue;
    const int chunk = column / kChunk;
    const uint4 value = *reinterpret_cast<const uint4*>(&tile[column][(unit ^ (chunk % 8)) * 4]);
    *reinterpret_cast<uint4*>(data_t + (tile_col + column) * row_length + row) =
        chunk / 8 == 0 ? value : make_uint4(value.z, value.w, value.x, value.y);
  }
}

// Column by column over the tile, for threads below 128: combine(values of the 16 warps). `mine` are this thread's
// values of its 8 columns, `pair` combines two. Every thread must call it; scratch may be used again after it.
template <class Combine, class Finish>
__device__ inline void ForColumns(float (&mine)[kChunk], const BlockPlace& at, float (&scratch)[kBlockWarps][kSide],
                                  Combine combine, Finish finish) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) mine[i] = combine(mine[i], __shfl_xor_sync(kFullMask, mine[i], kLanesPerRow));
  if (threadIdx.x % kWarp < kLanesPerRow) {
    float4* target = reinterpret_cast<float4*>(&scratch[threadIdx.x / kWarp][at.chunk * kChunk]);
    target[0] = make_float4(mine[0], mine[1], mine[2], mine[3]);
    target[1] = make_float4(mine[4], mine[5], mine[6], mine[7]);
  }
  __syncthreads();
  if (threadIdx.x < kSide) {
    float value = scratch[0][threadIdx.x];
#pragma unroll
    for (int warp = 1; warp < kBlockWarps; ++warp) value = combine(value, scratch[warp][threadIdx.x]);
    finish(static_cast<int>(threadIdx.x), value);
  }
  __syncthreads();
}

template <class T>
struct Packed {
  Chunk<T, kChunk> chunk;
  __device__ void Set(const float (&values)[kChunk]) {
    uint32_t* words = reinterpret_cast<uint32_t*>(chunk.vector);
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) words[i] = RoundPair(values[2 * i], values[2 * i + 1], T{});
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) words[i] = __float_as_uint(values[i]);
    }
  }
};

// One row of a chunk to FP8, each column with its scale. `magnitude`: not finite if any value is not.
__device__ inline void CastChunk(const float (&y)[kChunk], float magnitude, const float (&scale)[kChunk], bool e5m2,
                                 uint32_t (&words)[kWords]) {
  float scaled[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) scaled[i] = __fmul_rn(y[i], scale[i]);
  if (!(magnitude <= FLT_MAX)) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (!(fabsf(y[i]) <= FLT_MAX)) scaled[i] = __uint_as_float(kNaNBits);
    }
  }
#pragma unroll
  for (int j = 0; j < kWords; ++j) words[j] = CastFour(scaled + 4 * j, e5m2);
}

template <class Loader, bool kSquare, bool kDbias>
__global__ void __launch_bounds__(kBlockThreads, Loader::kOutputs == 1 && sizeof(typename Loader::Element) == 2 ? 2 : 1)
    BlockKernel(Loader loader, BlockParams params) {
  using T = typename Loader::Element;
  constexpr int kPlanes = Loader::kOutputs;
  __shared__ alignas(16) BlockTile tile;
  __shared__ alignas(16) float scratch[kBlockWarps][kSide];
  __shared__ alignas(16) float column_scale[kSide];
  __shared__ uint32_t max_scratch[kBlockWarps];

  const int64_t cols = params.cols, row_length = kPlanes * cols;
  // From the end: what a statistics pass has read last is still in the L2 cache.
  const BlockPlace at(static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x, params);
  const bool in_cols = at.col < cols;
  typename Loader::Fragment fragment[kRowsPerThread];
  typename Loader::Column column;
  if (in_cols) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (at.row + r < at.row_end) loader.Load(at.row + r, at.col, fragment[r]);
    }
    loader.LoadColumn(at.col, column);
  }

  Packed<T> kept[kPlanes][kRowsPerThread];
  float row_amax[kPlanes][kRowsPerThread], column_amax[kPlanes][kChunk] = {}, sums[kPlanes][kChunk] = {};
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float y[kPlanes][kChunk] = {};
    const bool inside = in_cols && at.row + r < at.row_end;
    if (inside) loader.Compute(at.row + r, fragment[r], column, y);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      row_amax[plane][r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        row_amax[plane][r] = MaxMagnitude(row_amax[plane][r], y[plane][i]);
        column_amax[plane][i] = MaxMagnitude(column_amax[plane][i], y[plane][i]);
        if constexpr (kDbias) sums[plane][i] += y[plane][i];
      }
      kept[plane][r].Set(y[plane]);
      if (params.hp != nullptr && inside) {
        kept[plane][r].chunk.Store(static_cast<T*>(params.hp) + (at.row + r) * row_length + plane * cols + at.col);
      }
    }
  }

#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int64_t first_col = plane * cols + at.col_tile * kSide;  // of the result
    float scale[kRowsPerThread];
    if constexpr (kSquare) {
      float amax = 0.0f;
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) amax = MaxMagnitude(amax, row_amax[plane][r]);
      const uint32_t bits = BlockMax<kBlockThreads>(__float_as_uint(amax), max_scratch);
      const ScalePair pair = BlockScale(AmaxFromBits(bits), params);
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) scale[r] = pair.scale;
      const int64_t col_blocks = (row_length + kSide - 1) / kSide, row_blocks = params.tiles_per_group;
      if (threadIdx.x == 0) {
        if (params.scale_inv != nullptr) params.scale_inv[at.row_tile * col_blocks + first_col / kSide] = pair.inverse;
        if (params.scale_inv_t != nullptr) {
          params.scale_inv_t[first_col / kSide * row_blocks + at.row_tile] = pair.inverse;
        }
      }
    } else {
      // The 16 lanes of a row agree on its amax; lane r of them finds the scale of row r for all.
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
        for (int offset = 1; offset < kLanesPerRow; offset *= 2) {
          row_amax[plane][r] =
              MaxMagnitude(row_amax[plane][r], __shfl_xor_sync(kFullMask, row_amax[plane][r], offset));
        }
      }
      if (params.data != nullptr) {
        float amax = row_amax[plane][0];
#pragma unroll
        for (int r = 1; r < kRowsPerThread; ++r) amax = at.chunk % kRowsPerThread == r ? row_amax[plane][r] : amax;
        const ScalePair pair = BlockScale(amax, params);
        if (at.chunk < kRowsPerThread && at.row + at.chunk < at.row_end) {
          params.scale_inv[first_col / kSide * params.rows + at.row + at.chunk] = pair.inverse;
        }
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          scale[r] = __shfl_sync(kFullMask, pair.scale, (threadIdx.x & kLanesPerRow) + r);
        }
      }
    }

    uint32_t words[kRowsPerThread][kWords];
    if (kSquare || params.data != nullptr) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        float y[kChunk], scales[kChunk];
        Unpack(kept[plane][r].chunk, y);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) scales[i] = scale[r];
        CastChunk(y, row_amax[plane][r], scales, params.e5m2, words[r]);
        if (params.data != nullptr && in_cols && at.row + r < at.row_end) {
          *reinterpret_cast<uint2*>(params.data + (at.row + r) * row_length + plane * cols + at.col) =
              make_uint2(words[r][0], words[r][1]);
        }
      }
    }
    if constexpr (kDbias) {
      ForColumns(sums[plane], at, scratch, [](float a, float b) { return a + b; }, [&](int i, float sum) {
        if (at.col_tile * kSide + i < cols) params.tile_sums[at.row_tile * row_length + first_col + i] = sum;
      });
    }
    if (params.data_t == nullptr) continue;
    if constexpr (!kSquare) {
      ForColumns(column_amax[plane], at, scratch, [](float a, float b) { return MaxMagnitude(a, b); },
                 [&](int i, float amax) {
                   const ScalePair pair = BlockScale(amax, params);
                   column_scale[i] = pair.scale;
                   if (at.col_tile * kSide + i < cols) {
                     params.scale_inv_t[at.row_tile * row_length + first_col + i] = pair.inverse;
                   }
                 });
      float scales[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) scales[i] = column_scale[at.chunk * kChunk + i];
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        float y[kChunk];
        Unpack(kept[plane][r].chunk, y);
        CastChunk(y, row_amax[plane][r], scales, params.e5m2, words[r]);
      }
    }
    StoreTransposed(words, at, tile);
    __syncthreads();
    WriteTransposed(tile, at.col_tile * kSide, cols, at.row_tile * kSide, params.padded_rows,
                    params.data_t + plane * cols * params.padded_rows);
    if (plane + 1 < kPlanes) __syncthreads();  // the tile is written again
  }
}

// Queues the kernel over y [rows, kOutputs * cols], and DbiasKernel. With two planes cols is whole blocks.
template <class Loader>
cudaError_t LaunchBlockPass(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out, float* tile_sums,
                            cudaStream_t stream) {
  const bool square = out.scaling == Scaling::kBlock128x128;
  BlockParams params{};
  params.rows = rows;
  params.cols = cols;
  params.group_rows = out.group_rows;
  params.tiles_per_group = NumBlocks(out.group_rows);
  params.padded_rows = square ? rows : PaddedRows(rows, out);
  params.format_max = FP8Max(out.format);
  params.power_of_two = out.power_of_two;
  params.e5m2 = out.format == DType::kE5M2;
  params.hp = out.hp;
  params.data = static_cast<uint8_t*>(out.data);
  params.data_t = static_cast<uint8_t*>(out.data_t);
  params.scale_inv = out.scale_inv;
  params.scale_inv_t = out.scale_inv_t;
  params.tile_sums = out.dbias == nullptr ? nullptr : tile_sums;
  const auto tiles = static_cast<unsigned>(BlockRowTiles(rows, out) * NumBlocks(cols));
  const auto launch = [&](auto kernel) {
    kernel<<<tiles, kBlockThreads, 0, stream>>>(loader, params);
    return cudaGetLastError();
  };
  const cudaError_t error =
      out.dbias == nullptr
          ? square ? launch(BlockKernel<Loader, true, false>) : launch(BlockKernel<Loader, false, false>)
          : square ? launch(BlockKernel<Loader, true, true>) : launch(BlockKernel<Loader, false, true>);
  if (error != cudaSuccess || out.dbias == nullptr) return error;
  return LaunchDbias(BlockRowTiles(rows, out), Loader::kOutputs * cols, tile_sums, out, stream);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_PASS_CUH_
