// The end of a quantizing pass in block scaling: every block of y is cast with the scale of its own amax. One read of
// the operands, one write of each result, in tiles of 128 x 128, so that a block of each kind lies in one tile:
//
//   data   1x128 blocks along the columns: 16 lanes of a warp hold one
//   data_t 1x128 blocks along the rows of a group (QuantizedOut), cast again with their own scales; transposed in shared
//          memory
//   both   128x128 blocks: one scale for the tile
//
// y comes from the loaders of quantizing_pass.cuh and stays in registers, in its own dtype, until all amaxes are known.
// A loader whose y is what it reads may have `const Chunk<T, kChunk>& Raw(const Fragment&) const`.
#ifndef TE_JAX_KERNELS_BLOCK_PASS_CUH_
#define TE_JAX_KERNELS_BLOCK_PASS_CUH_

#include <type_traits>

#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {

constexpr int kSide = 128;
constexpr int kLanesPerRow = kSide / kChunk;  // 16: a warp has two groups of 4 rows
static_assert(kSide == kBlock);

// How a tile is shared: by kThreads threads, 4 rows x 8 columns each, kPasses times.
template <int kTileThreads_, int kBlocksPerSM_>
struct BlockGeometry {
  static constexpr int kTileThreads = kTileThreads_, kBlocksPerSM = kBlocksPerSM_;
  static constexpr int kTileWarps = kTileThreads / kWarp;
  static constexpr int kPasses = kSide * kSide / (kTileThreads * kRowsPerThread * kChunk);
  static constexpr int kRows = kPasses * kRowsPerThread;  // of a thread
};

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

// Magnitudes of elements as integers, which are ordered like them, NaN above infinity; 16-bit ones in pairs.
template <class T>
struct Magnitudes {
  static constexpr bool kPairs = sizeof(T) == 2;
  static constexpr int kWordsOfChunk = kChunk * static_cast<int>(sizeof(T)) / 4;
  static constexpr uint32_t kInfinity = !kPairs ? kInfinityBits : std::is_same_v<T, BF16> ? 0x7f80u : 0x7c00u;

  __device__ static uint32_t Of(uint32_t word) { return word & (kPairs ? 0x7fff7fffu : 0x7fffffffu); }
  __device__ static uint32_t Max(uint32_t a, uint32_t b) {
    if constexpr (kPairs) {
      uint32_t result;
      asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
      return result;
    } else {
      return max(a, b);
    }
  }
  // The larger one of a pair.
  __device__ static uint32_t Fold(uint32_t word) { return kPairs ? max(word & 0xffffu, word >> 16) : word; }
  __device__ static float ToFloat(uint32_t magnitude) {
    if constexpr (kPairs) {
      return ToFloat2(magnitude, T{}).x;
    } else {
      return __uint_as_float(magnitude);
    }
  }
  // maxima[i]: over the 16 lanes that share a row.
  template <int kRows>
  __device__ static void ReduceRows(uint32_t (&maxima)[kRows]) {
    constexpr int kStep = kPairs ? 2 : 1;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      uint32_t word = kPairs ? maxima[r] | maxima[r + kStep - 1] << 16 : maxima[r];
#pragma unroll
      for (int offset = 1; offset < kLanesPerRow; offset *= 2) {
        word = Max(word, __shfl_xor_sync(kFullMask, word, offset));
      }
      maxima[r] = kPairs ? word & 0xffffu : word;
      if constexpr (kPairs) maxima[r + 1] = word >> 16;
    }
  }
};

// The place of this thread in a tile.
template <class Geometry>
struct BlockPlace {
  int chunk, group;  // of 16 chunks; of groups of 4 rows
  int64_t row_tile, col_tile, tile_row, row_end, col;
  __device__ BlockPlace(int64_t index, const BlockParams& params) {
    const int64_t tiles_per_row = (params.cols + kSide - 1) / kSide;
    chunk = threadIdx.x % kLanesPerRow;
    group = threadIdx.x / kLanesPerRow;
    row_tile = index / tiles_per_row;
    col_tile = index % tiles_per_row;
    const int64_t group_start = row_tile / params.tiles_per_group * params.group_rows;
    tile_row = group_start + row_tile % params.tiles_per_group * kSide;
    row_end = group_start + params.group_rows;
    col = col_tile * kSide + kChunk * chunk;
  }
  // Groups of 4 rows of the tile, and rows of y, by pass.
  __device__ int GroupOf(int pass) const { return pass * (kSide / kRowsPerThread / Geometry::kPasses) + group; }
  __device__ int64_t Row(int r) const {
    return tile_row + GroupOf(r / kRowsPerThread) * kRowsPerThread + r % kRowsPerThread;
  }
};

// A tile [columns][rows] of bytes. A word of 4 rows lies in 16-byte unit (row / 16) ^ (chunk % 8) of its column, and in
// the upper 8 chunks in the other half of the unit: no bank conflicts for the stores of a warp (16 chunks of 8 rows),
// nor for 16-byte reads along a column.
using BlockTile = uint32_t[kSide][kSide / 4];

__device__ inline void StoreTransposed(const uint32_t (&words)[kRowsPerThread][kWords], int chunk, int group,
                                       BlockTile& tile) {
  const int slot = ((group / 4) ^ (chunk % 8)) * 4 + ((group % 4) ^ (chunk / 8 * 2));
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const uint32_t low01 = __byte_perm(words[0][j], words[1][j], 0x5140);  // r0c0 r1c0 r0c1 r1c1
    const uint32_t low23 = __byte_perm(words[2][j], words[3][j], 0x5140);
    const uint32_t high01 = __byte_perm(words[0][j], words[1][j], 0x7362);  // r0c2 r1c2 r0c3 r1c3
    const uint32_t high23 = __byte_perm(words[2][j], words[3][j], 0x7362);
    const int column = chunk * kChunk + 4 * j;
    tile[column][slot] = __byte_perm(low01, low23, 0x5410);
    tile[column + 1][slot] = __byte_perm(low01, low23, 0x7632);
    tile[column + 2][slot] = __byte_perm(high01, high23, 0x5410);
    tile[column + 3][slot] = __byte_perm(high01, high23, 0x7632);
  }
}

// Writes the tile's columns as rows of data_t [cols, row_length], from `first_row` on, up to row_length.
template <class Geometry>
__device__ inline void WriteTransposed(const BlockTile& tile, int64_t tile_col, int64_t cols, int64_t first_row,
                                       int64_t row_length, uint8_t* data_t) {
  constexpr int kUnits = kSide / kUnit;
  const int unit = threadIdx.x % kUnits;
  const int64_t row = first_row + unit * kUnit;
#pragma unroll
  for (int column = threadIdx.x / kUnits; column < kSide; column += Geometry::kTileThreads / kUnits) {
    if (tile_col + column >= cols || row >= row_length) continue;
    const int chunk = column / kChunk;
    const uint4 value = *reinterpret_cast<const uint4*>(&tile[column][(unit ^ (chunk % 8)) * 4]);
    *reinterpret_cast<uint4*>(data_t + (tile_col + column) * row_length + row) =
        chunk / 8 == 0 ? value : make_uint4(value.z, value.w, value.x, value.y);
  }
}

template <class Loader, class = void>
struct HasRaw : std::false_type {};
template <class Loader>
struct HasRaw<Loader, std::void_t<decltype(&Loader::Raw)>> : std::true_type {};

// values, rounded to T and packed as they lie in memory.
template <class T>
__device__ inline Chunk<T, kChunk> Pack(const float (&values)[kChunk]) {
  Chunk<T, kChunk> chunk;
  uint32_t* words = reinterpret_cast<uint32_t*>(chunk.vector);
#pragma unroll
  for (int i = 0; i < Magnitudes<T>::kWordsOfChunk; ++i) {
    if constexpr (sizeof(T) == 2) {
      words[i] = RoundPair(values[2 * i], values[2 * i + 1], T{});
    } else {
      words[i] = __float_as_uint(values[i]);
    }
  }
  return chunk;
}

// One row of a chunk to FP8, column i with scale[i * kStride]. A value that is not finite becomes NaN, which is looked
// for only where there is one.
template <int kStride>
__device__ inline void CastChunk(const float (&y)[kChunk], bool finite, const float* scale, bool e5m2,
                                 uint32_t (&words)[kWords]) {
  float scaled[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) scaled[i] = __fmul_rn(y[i], scale[i * kStride]);
  if (!finite) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (!(fabsf(y[i]) <= FLT_MAX)) scaled[i] = __uint_as_float(kNaNBits);
    }
  }
#pragma unroll
  for (int j = 0; j < kWords; ++j) words[j] = CastFour(scaled + 4 * j, e5m2);
}

template <class Geometry>
struct BlockMemory {
  alignas(16) BlockTile tile;
  alignas(16) uint32_t warps[Geometry::kTileWarps][kSide];  // by column: what each warp has found
  alignas(16) float column_scale[kSide];
  uint32_t maxima[Geometry::kTileWarps];
};

// finish(column, sum) by one thread for each column of the tile.
template <class Geometry, class Finish>
__device__ inline void SumColumns(float (&sums)[kChunk], int chunk, BlockMemory<Geometry>& memory, Finish finish) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sums[i] += __shfl_xor_sync(kFullMask, sums[i], kLanesPerRow);
  if (threadIdx.x % kWarp < kLanesPerRow) {
    uint32_t* target = &memory.warps[threadIdx.x / kWarp][chunk * kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) target[i] = __float_as_uint(sums[i]);
  }
  __syncthreads();
  if (threadIdx.x < kSide) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Geometry::kTileWarps; ++warp) sum += __uint_as_float(memory.warps[warp][threadIdx.x]);
    finish(static_cast<int>(threadIdx.x), sum);
  }
  __syncthreads();  // may be written again
}

// finish(column, amax) by one thread for each column of the tile. Ends with a barrier.
template <class T, class Geometry, class Finish>
__device__ inline void MaxColumns(uint32_t (&maxima)[Magnitudes<T>::kWordsOfChunk], int chunk,
                                  BlockMemory<Geometry>& memory, Finish finish) {
  using M = Magnitudes<T>;
  constexpr int kWordsOfRow = kSide / kChunk * M::kWordsOfChunk;
  uint32_t* words = &memory.warps[0][0];
#pragma unroll
  for (int i = 0; i < M::kWordsOfChunk; ++i) {
    maxima[i] = M::Max(maxima[i], __shfl_xor_sync(kFullMask, maxima[i], kLanesPerRow));
  }
  if (threadIdx.x % kWarp < kLanesPerRow) {
    uint4* target = reinterpret_cast<uint4*>(words + threadIdx.x / kWarp * kWordsOfRow + chunk * M::kWordsOfChunk);
#pragma unroll
    for (int i = 0; i < M::kWordsOfChunk / 4; ++i) {
      target[i] = make_uint4(maxima[4 * i], maxima[4 * i + 1], maxima[4 * i + 2], maxima[4 * i + 3]);
    }
  }
  __syncthreads();
  if (threadIdx.x < kSide) {
    using Element = std::conditional_t<M::kPairs, uint16_t, uint32_t>;
    const Element* elements = reinterpret_cast<const Element*>(words);
    uint32_t amax = 0;
#pragma unroll
    for (int warp = 0; warp < Geometry::kTileWarps; ++warp) {
      amax = max(amax, static_cast<uint32_t>(elements[warp * kSide + threadIdx.x]));
    }
    finish(static_cast<int>(threadIdx.x), M::ToFloat(amax));
  }
  __syncthreads();
}

template <class Loader, class Geometry, bool kSquare, bool kDbias>
__global__ void __launch_bounds__(Geometry::kTileThreads, Geometry::kBlocksPerSM)
    BlockKernel(Loader loader, BlockParams params) {
  using T = typename Loader::Element;
  using M = Magnitudes<T>;
  constexpr int kPlanes = Loader::kOutputs, kRows = Geometry::kRows;
  constexpr bool kRaw = HasRaw<Loader>::value;
  __shared__ BlockMemory<Geometry> memory;

  const int64_t cols = params.cols, row_length = kPlanes * cols;
  // From the end: what a statistics pass has read last is still in the L2 cache.
  const BlockPlace<Geometry> at(static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x, params);
  const bool in_cols = at.col < cols;
  typename Loader::Fragment fragment[kRows];
  typename Loader::Column column;
  if (in_cols) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at.Row(r) < at.row_end) loader.Load(at.Row(r), at.col, fragment[r]);
    }
    loader.LoadColumn(at.col, column);
  }

  Chunk<T, kChunk> kept[kPlanes][kRows];
  uint32_t row_max[kPlanes][kRows], column_max[kPlanes][M::kWordsOfChunk] = {};
  float sums[kPlanes][kChunk] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool inside = in_cols && at.Row(r) < at.row_end;
    if constexpr (kRaw) {
      kept[0][r] = inside ? loader.Raw(fragment[r]) : Chunk<T, kChunk>{};
    } else {
      float y[kPlanes][kChunk] = {};
      if (inside) loader.Compute(at.Row(r), fragment[r], column, y);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        kept[plane][r] = Pack<T>(y[plane]);
        if constexpr (kDbias) {
#pragma unroll
          for (int i = 0; i < kChunk; ++i) sums[plane][i] += y[plane][i];
        }
      }
    }
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(kept[plane][r].vector);
      uint32_t max_of_row = 0;
#pragma unroll
      for (int i = 0; i < M::kWordsOfChunk; ++i) {
        const uint32_t magnitude = M::Of(words[i]);
        max_of_row = M::Max(max_of_row, magnitude);
        column_max[plane][i] = M::Max(column_max[plane][i], magnitude);
      }
      row_max[plane][r] = M::Fold(max_of_row);
      if (params.hp != nullptr && inside) {
        kept[plane][r].Store(static_cast<T*>(params.hp) + at.Row(r) * row_length + plane * cols + at.col);
      }
      if constexpr (kRaw && kDbias) {
        float y[kChunk];
        Unpack(kept[plane][r], y);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sums[plane][i] += y[i];
      }
    }
  }

#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int64_t first_col = plane * cols + at.col_tile * kSide;  // of the result
    uint32_t not_finite = 0;                                       // bit r: this thread's part of row r
#pragma unroll
    for (int r = 0; r < kRows; ++r) not_finite |= (row_max[plane][r] >= M::kInfinity ? 1u : 0u) << r;

    float row_scale[kRows];
    if constexpr (kSquare) {
      uint32_t bits = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) bits = max(bits, row_max[plane][r]);
      bits = BlockMax<Geometry::kTileThreads>(bits, memory.maxima);
      const ScalePair pair = BlockScale(M::ToFloat(bits), params);
#pragma unroll
      for (int r = 0; r < kRows; ++r) row_scale[r] = pair.scale;
      if (threadIdx.x == 0) {
        const int64_t block = first_col / kSide, col_blocks = (row_length + kSide - 1) / kSide;
        if (params.scale_inv != nullptr) params.scale_inv[at.row_tile * col_blocks + block] = pair.inverse;
        if (params.scale_inv_t != nullptr) {
          params.scale_inv_t[block * params.tiles_per_group + at.row_tile] = pair.inverse;
        }
      }
    } else {
      if (params.data != nullptr) {
        // The 16 lanes of a row agree on its amax; lane r of them finds the scale of row r for all.
        M::ReduceRows(row_max[plane]);
        const int mine = at.chunk % kRows;
        uint32_t bits = row_max[plane][0];
        int64_t row = at.Row(0);
#pragma unroll
        for (int r = 1; r < kRows; ++r) {
          bits = mine == r ? row_max[plane][r] : bits;
          row = mine == r ? at.Row(r) : row;
        }
        const ScalePair pair = BlockScale(M::ToFloat(bits), params);
        if (at.chunk < kRows && row < at.row_end) {
          params.scale_inv[first_col / kSide * params.rows + row] = pair.inverse;
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          row_scale[r] = __shfl_sync(kFullMask, pair.scale, (threadIdx.x & kLanesPerRow) + r);
        }
      }
      if (params.data_t != nullptr) {
        MaxColumns<T>(column_max[plane], at.chunk, memory, [&](int i, float amax) {
          const ScalePair pair = BlockScale(amax, params);
          memory.column_scale[i] = pair.scale;
          if (at.col_tile * kSide + i < cols) {
            params.scale_inv_t[at.row_tile * row_length + first_col + i] = pair.inverse;
          }
        });
      }
    }

    float column_scale[kChunk];
    if (!kSquare && params.data_t != nullptr) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) column_scale[i] = memory.column_scale[at.chunk * kChunk + i];
    }
#pragma unroll
    for (int pass = 0; pass < Geometry::kPasses; ++pass) {
      uint32_t words[kRowsPerThread][kWords];
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int r = pass * kRowsPerThread + i;
        const bool finite = (not_finite >> r & 1) == 0;
        float y[kChunk];
        Unpack(kept[plane][r], y);
        if (kSquare || params.data != nullptr) {
          CastChunk<0>(y, finite, &row_scale[r], params.e5m2, words[i]);
          if (params.data != nullptr && in_cols && at.Row(r) < at.row_end) {
            *reinterpret_cast<uint2*>(params.data + at.Row(r) * row_length + plane * cols + at.col) =
                make_uint2(words[i][0], words[i][1]);
          }
        }
        if (!kSquare && params.data_t != nullptr) CastChunk<1>(y, finite, column_scale, params.e5m2, words[i]);
      }
      if (params.data_t != nullptr) StoreTransposed(words, at.chunk, at.GroupOf(pass), memory.tile);
    }
    if constexpr (kDbias) {
      SumColumns(sums[plane], at.chunk, memory, [&](int i, float sum) {
        if (at.col_tile * kSide + i < cols) params.tile_sums[at.row_tile * row_length + first_col + i] = sum;
      });
    }
    if (params.data_t == nullptr) continue;
    if constexpr (!kDbias) __syncthreads();
    WriteTransposed<Geometry>(memory.tile, at.col_tile * kSide, cols, at.row_tile * kSide, params.padded_rows,
                              params.data_t + plane * cols * params.padded_rows);
    if (plane + 1 < kPlanes) __syncthreads();  // the tile is written again
  }
}

template <class Loader>
using DefaultGeometry = BlockGeometry<512, Loader::kOutputs == 1 && sizeof(typename Loader::Element) == 2 ? 2 : 1>;

// Queues the kernel over y [rows, kOutputs * cols], and DbiasKernel. With two planes cols is whole blocks.
template <class Loader, class Geometry>
cudaError_t LaunchBlocks(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out, float* tile_sums,
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
    kernel<<<tiles, Geometry::kTileThreads, 0, stream>>>(loader, params);
    return cudaGetLastError();
  };
  const cudaError_t error =
      out.dbias == nullptr
          ? square ? launch(BlockKernel<Loader, Geometry, true, false>) : launch(BlockKernel<Loader, Geometry, false, false>)
          : square ? launch(BlockKernel<Loader, Geometry, true, true>) : launch(BlockKernel<Loader, Geometry, false, true>);
  if (error != cudaSuccess || out.dbias == nullptr) return error;
  return LaunchDbias(BlockRowTiles(rows, out), Loader::kOutputs * cols, tile_sums, out, stream);
}

template <class Loader>
cudaError_t LaunchBlockPass(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out, float* tile_sums,
                            cudaStream_t stream) {
  return LaunchBlocks<Loader, DefaultGeometry<Loader>>(loader, rows, cols, out, tile_sums, stream);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_PASS_CUH_
