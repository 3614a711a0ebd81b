// What a pass in block scaling (block_pass.cuh) does within a tile of 128 x 128: maxima of magnitudes along its rows
// and columns, sums along its columns, its transposition.
#ifndef TE_JAX_KERNELS_BLOCK_TILE_CUH_
#define TE_JAX_KERNELS_BLOCK_TILE_CUH_

#include <type_traits>

#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {

constexpr int kSide = 128;
constexpr int kLanesPerRow = kSide / kChunk;  // 16: a warp has two groups of 4 rows
static_assert(kSide == kBlock);

// How a tile is shared: by kTileThreads threads, 4 rows x 8 columns each, kPasses times.
template <int kTileThreads_, int kBlocksPerSM_>
struct BlockGeometry {
  static constexpr int kTileThreads = kTileThreads_, kBlocksPerSM = kBlocksPerSM_;
  static constexpr int kTileWarps = kTileThreads / kWarp;
  static constexpr int kPasses = kSide * kSide / (kTileThreads * kRowsPerThread * kChunk);
  static constexpr int kRows = kPasses * kRowsPerThread;  // of a thread
};

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

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_TILE_CUH_
