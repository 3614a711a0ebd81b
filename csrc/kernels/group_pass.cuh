// A quantizing pass with a scale for each group of rows (QuantizedOut::groups), for the loaders of quantizing_pass.cuh
// and in their tiles. A tile may hold rows of many groups: every row looks up its own, and what is found for a group (amax)
// meets in one word of memory, as an integer maximum, whose order doesn't matter.
//
// Kernels on the stream, in this order:
//   StartGroups   one block: where each group ends, and whether any scale has to be derived; zeroes the maxima
//   GroupAmax     if an amax is wanted alone or a scale may be derived; its blocks return at once if none has to be, and
//                 read what belongs to groups whose scale is
//   WriteGroups   if data or data_t is wanted; takes the amax of the other groups too
#ifndef TE_JAX_KERNELS_GROUP_PASS_CUH_
#define TE_JAX_KERNELS_GROUP_PASS_CUH_

#include <cuda_runtime.h>

#include "csrc/core/grouped_args.h"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {

struct GroupParams {
  int64_t rows, cols;  // of one plane
  int64_t groups, group_rows;  // group_rows > 0: groups of so many rows each, else ragged ones
  const int32_t* group_sizes;  // [groups], or null
  const float* scale;          // [groups]
  float format_max;
  int32_t margin;
  bool power_of_two, e5m2;
  uint8_t* data;
  uint8_t* data_t;
  float *scale_used, *scale_inv;  // [groups]
  float* amax;                    // [groups], or null
  // The workspace.
  int64_t* ends;      // [groups]
  uint32_t* maxima;   // [groups], bits
  uint32_t* derives;  // [1]: whether the scale of any group with rows is derived from its amax
};

constexpr int kMaxAmaxBlocks = 1056;  // eight per multiprocessor of an H200, twice as many as it has room for
constexpr int kMaxGroupsPerThread = kMaxGroups / kThreads;
static_assert(kMaxGroups % kThreads == 0);

// The end of every group: the sum of the sizes up to it, cut off at the number of rows (GroupEnd of grouped_args.h).
__device__ inline void FindEnds(const GroupParams& params) {
  __shared__ int64_t sums[2][kThreads];
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kMaxGroupsPerThread;
  int64_t sizes[kMaxGroupsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxGroupsPerThread; ++i) {
    sizes[i] = first + i < params.groups ? max(params.group_sizes[first + i], 0) : 0;
    sum += sizes[i];
  }
  int from = 0;
  sums[from][threadIdx.x] = sum;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2, from ^= 1) {
    const int64_t before = static_cast<int>(threadIdx.x) >= distance ? sums[from][threadIdx.x - distance] : 0;
    sums[from ^ 1][threadIdx.x] = sums[from][threadIdx.x] + before;
    __syncthreads();
  }
  int64_t end = sums[from][threadIdx.x] - sum;
#pragma unroll
  for (int i = 0; i < kMaxGroupsPerThread; ++i) {
    end += sizes[i];
    if (first + i < params.groups) params.ends[first + i] = min(end, params.rows);
  }
}

// A template, like all that a header for several translation units defines.
template <int kUnused = 0>
__global__ void __launch_bounds__(kThreads) StartGroups(GroupParams params) {
  AwaitPredecessor();
  if (params.group_sizes != nullptr) FindEnds(params);
  int derives = 0;
  for (int64_t g = threadIdx.x; g < params.groups; g += kThreads) {
    params.maxima[g] = 0;
    // A group without rows needs no scale: one that waits for its first tokens costs no pass.
    const bool empty = params.group_sizes != nullptr && params.group_sizes[g] <= 0;
    derives |= params.scale[g] == 0.0f && !empty;
  }
  derives = __syncthreads_or(derives);
  if (threadIdx.x == 0) *params.derives = derives;
}

__device__ inline float ScaleOfGroup(const GroupParams& params, int64_t group) {
  float scale = params.scale[group];
  if (scale == 0.0f) {
    scale = ScaleFromAmax(__uint_as_float(params.maxima[group]), params.format_max, params.margin, params.power_of_two);
  }
  return scale > 0.0f ? scale : __uint_as_float(kNaNBits);  // a broken state must be loud
}

// The groups of a tile's first and last row; `groups` for a row that belongs to none. Of most tiles they are the same.
struct GroupSpan {
  int first, last;
};

// By the whole block. A row's group is the number of groups that end at it or before.
__device__ inline GroupSpan SpanOf(const GroupParams& params, int64_t tile_row) {
  const int64_t last_row = min(tile_row + kTileRows, params.rows) - 1;
  if (params.group_rows > 0) {
    return {static_cast<int>(tile_row / params.group_rows), static_cast<int>(last_row / params.group_rows)};
  }
  GroupSpan span{0, 0};
  for (int64_t before = 0; before < params.groups; before += kThreads) {
    const int64_t g = before + threadIdx.x;
    const int64_t end = g < params.groups ? params.ends[g] : params.rows;
    span.first += __syncthreads_count(end <= tile_row);
    span.last += __syncthreads_count(end <= last_row);
  }
  return span;
}

// The group of a row that is inside of a tile with that span.
__device__ inline int GroupOf(const GroupParams& params, const GroupSpan& span, int64_t row) {
  if (span.first == span.last) return span.first;
  if (params.group_rows > 0) return static_cast<int>(row / params.group_rows);
  int low = span.first, high = span.last;  // the first group that ends behind the row
  while (low < high) {
    const int middle = (low + high) / 2;
    if (params.ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// What the rows of a tile belong to, in shared memory.
struct TileGroups {
  alignas(16) int group[kTileRows];    // `groups`: none
  alignas(16) float scale[kTileRows];  // of the group
  uint32_t maxima[kTileRows];
  uint32_t scratch[kWarps];
};

// The rows of this thread.
struct ThreadGroups {
  int group[kRowsPerThread];
  __device__ ThreadGroups(const TileGroups& tile, const Place& at) {
    const int4 groups = *reinterpret_cast<const int4*>(&tile.group[kRowsPerThread * at.group]);
    group[0] = groups.x;
    group[1] = groups.y;
    group[2] = groups.z;
    group[3] = groups.w;
  }
};
static_assert(kRowsPerThread == 4);

// The maximum of a group grows to `bits` at least. Few do: of many blocks with rows of a group most find it grown
// already, and a read doesn't wait for its turn as an atomic does. It may be an old one, which is lower.
__device__ inline void Raise(uint32_t* maximum, uint32_t bits) {
  bits = __float_as_uint(AmaxFromBits(bits));
  if (__ldcg(maximum) < bits) atomicMax(maximum, bits);
}

// The maxima of the tile's rows, each [kRowsPerThread] of a thread, into those of their groups. By the whole block.
__device__ inline void AddMaxima(const GroupParams& params, const float (&row_amax)[kRowsPerThread], const Place& at,
                                 const GroupSpan& span, TileGroups& tile) {
  const int lane = threadIdx.x % kWarp;
  if (span.first == span.last) {
    float amax = 0.0f;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) amax = MaxMagnitude(amax, row_amax[r]);
    const uint32_t bits = BlockMax<kThreads>(__float_as_uint(amax), tile.scratch);
    if (threadIdx.x == 0 && span.first < params.groups) Raise(params.maxima + span.first, bits);
    return;
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    uint32_t bits = __float_as_uint(row_amax[r]);
#pragma unroll
    for (int offset = 1; offset < kChunksPerTile; offset *= 2) {
      bits = max(bits, __shfl_xor_sync(kFullMask, bits, offset));
    }
    if (at.chunk == 0) tile.maxima[kRowsPerThread * at.group + r] = bits;
  }
  __syncthreads();
  if (threadIdx.x < kTileRows) {  // whole warps
    const int group = tile.group[threadIdx.x];
    const unsigned mask = __match_any_sync(kFullMask, group);
    const uint32_t bits = __reduce_max_sync(mask, tile.maxima[threadIdx.x]);
    if (lane == __ffs(mask) - 1 && group < params.groups) Raise(params.maxima + group, bits);
  }
  __syncthreads();  // the tile's memory may be written again
}

// A block's part are tiles that follow each other, along a row of tiles first: what it finds goes to memory once for
// each of those rows. Tiles of which all scales are given are left out, unless `always`.
template <class Loader>
__global__ void __launch_bounds__(kThreads) GroupAmax(Loader loader, GroupParams params, bool always) {
  __shared__ TileGroups tile;
  AwaitPredecessor();
  if (!always && *params.derives == 0) return;
  const int64_t col_tiles = NumColTiles(params.cols), num_tiles = NumRowTiles(params.rows) * col_tiles;
  const int64_t share = (num_tiles + gridDim.x - 1) / gridDim.x;
  int64_t index = blockIdx.x * share;
  const int64_t end = min(index + share, num_tiles);
  while (index < end) {
    Place at(index, params.cols);
    const int64_t stop = min(end, index + (params.cols - at.tile_col + kTileCols - 1) / kTileCols);
    const GroupSpan span = SpanOf(params, at.tile_row);
    bool wanted = false;
    if (threadIdx.x < kTileRows) {
      const int64_t row = at.tile_row + threadIdx.x;
      const int group = row < params.rows ? GroupOf(params, span, row) : static_cast<int>(params.groups);
      tile.group[threadIdx.x] = group;
      wanted = group < params.groups && (always || params.scale[group] == 0.0f);
    }
    if (__syncthreads_or(wanted)) {
      const ThreadGroups groups(tile, at);
      float row_amax[kRowsPerThread] = {};
      for (; index < stop; ++index, at.col += kTileCols) {
        if (at.col >= params.cols) continue;
        const Operands<Loader> operands(loader, at, params.rows, params.cols);
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          if (groups.group[r] >= params.groups) continue;
          float y[Loader::kOutputs][kChunk];
          loader.Compute(at.row + r, operands.fragment[r], operands.column, y);
#pragma unroll
          for (int plane = 0; plane < Loader::kOutputs; ++plane) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) row_amax[r] = MaxMagnitude(row_amax[r], y[plane][i]);
          }
        }
      }
      AddMaxima(params, row_amax, at, span, tile);
    }
    index = stop;
    __syncthreads();  // the tile's memory is written again
  }
}

// Writes the tile's columns as rows of data_t. A unit of 16 rows lies in one group where each has a copy of its own.
__device__ inline void WriteTransposedGroups(const TransposedTile& transposed, const Place& at,
                                             const GroupParams& params, const TileGroups& tile,
                                             int64_t plane_cols_before) {
  const int unit = threadIdx.x % kUnitsPerTile;
  const int64_t row = at.tile_row + unit * kUnit;
  const bool ragged = params.group_rows == 0;
  const int64_t length = ragged ? PaddedTokens(params.rows) : params.group_rows;
  if (row >= (ragged ? length : params.rows)) return;
  const int64_t group = ragged ? 0 : tile.group[unit * kUnit];
  uint8_t* to = params.data_t + (group * params.cols + plane_cols_before) * length + (row - group * length);
#pragma unroll
  for (int column = threadIdx.x / kUnitsPerTile; column < kTileCols; column += kThreads / kUnitsPerTile) {
    if (at.tile_col + column >= params.cols) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(&transposed[column][(unit ^ (column / kChunk)) * 4]);
    *reinterpret_cast<uint4*>(to + (at.tile_col + column) * length) = value;
  }
}

template <class Loader>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<Loader>) WriteGroups(Loader loader, GroupParams params) {
  constexpr int kPlanes = Loader::kOutputs;
  __shared__ alignas(16) TransposedTile transposed[kPlanes];
  __shared__ TileGroups tile;
  AwaitPredecessor();
  if (blockIdx.x == 0) {
    for (int64_t g = threadIdx.x; g < params.groups; g += kThreads) {
      const float scale = ScaleOfGroup(params, g);
      params.scale_used[g] = scale;
      params.scale_inv[g] = __fdiv_rn(1.0f, scale);
    }
  }
  // From the end: what an amax pass has read last is still in the L2 cache.
  const Place at(gridDim.x - 1 - blockIdx.x, params.cols);
  const Operands<Loader> operands(loader, at, params.rows, params.cols);
  const GroupSpan span = SpanOf(params, at.tile_row);
  bool given = false;  // a maximum that no pass before has found
  if (threadIdx.x < kTileRows) {
    const int64_t row = at.tile_row + threadIdx.x;
    const int group = row < params.rows ? GroupOf(params, span, row) : static_cast<int>(params.groups);
    tile.group[threadIdx.x] = group;
    tile.scale[threadIdx.x] = group < params.groups ? ScaleOfGroup(params, group) : 1.0f;
    given = group < params.groups && params.scale[group] != 0.0f;
  }
  given = __syncthreads_or(given);
  const ThreadGroups groups(tile, at);
  float row_amax[kRowsPerThread] = {};
  uint32_t words[kPlanes][kRowsPerThread][kWords] = {};
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const bool inside = at.row + r < params.rows && at.col < params.cols, belongs = groups.group[r] < params.groups;
    float y[kPlanes][kChunk] = {};
    if (inside && belongs) loader.Compute(at.row + r, operands.fragment[r], operands.column, y);
    const float scale = tile.scale[kRowsPerThread * at.group + r];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      float magnitude = 0.0f, scaled[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) magnitude = MaxMagnitude(magnitude, y[plane][i]);
      row_amax[r] = MaxMagnitude(row_amax[r], magnitude);
      ScaleForCast(y[plane], magnitude, scale, scaled);
      if (inside && belongs) {  // else they stay 0: columns of no tensor, rows of no group, whatever the scale
#pragma unroll
        for (int j = 0; j < kWords; ++j) words[plane][r][j] = CastFour(scaled + 4 * j, params.e5m2);
      }
      if (params.data != nullptr && inside) {
        const int64_t offset = (at.row + r) * kPlanes * params.cols + plane * params.cols + at.col;
        *reinterpret_cast<uint2*>(params.data + offset) = make_uint2(words[plane][r][0], words[plane][r][1]);
      }
    }
  }
  if (params.data_t != nullptr) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) StoreTransposed(words[plane], at, transposed[plane]);
    __syncthreads();
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      WriteTransposedGroups(transposed[plane], at, params, tile, plane * params.cols);
    }
  }
  if (params.amax != nullptr && given) AddMaxima(params, row_amax, at, span, tile);
}

inline GroupParams MakeGroupParams(int64_t rows, int64_t cols, const QuantizedOut& out, void* memory) {
  GroupParams params{};
  params.rows = rows;
  params.cols = cols;
  params.groups = out.groups;
  params.group_rows = out.group_sizes == nullptr ? rows / out.groups : 0;
  params.group_sizes = out.group_sizes;
  params.scale = out.scale;
  params.format_max = FP8Max(out.format);
  params.margin = out.margin;
  params.power_of_two = out.power_of_two;
  params.e5m2 = out.format == DType::kE5M2;
  params.data = static_cast<uint8_t*>(out.data);
  params.data_t = static_cast<uint8_t*>(out.data_t);
  params.scale_used = out.scale_used;
  params.scale_inv = out.scale_inv;
  params.amax = out.amax;
  params.ends = static_cast<int64_t*>(memory);
  params.derives = reinterpret_cast<uint32_t*>(params.ends + out.groups);
  // Where an amax is wanted, the maxima are its bits already.
  params.maxima = out.amax == nullptr ? params.derives + 1 : reinterpret_cast<uint32_t*>(out.amax);
  return params;
}

// The whole pass over y [rows, kOutputs * cols].
template <class Loader>
cudaError_t LaunchGroupPass(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out, void* memory,
                            cudaStream_t stream) {
  const GroupParams params = MakeGroupParams(rows, cols, out, memory);
  cudaError_t error = Launch(StartGroups<>, 1, kThreads, stream, params);
  if (error != cudaSuccess) return error;
  const int64_t num_tiles = NumRowTiles(rows) * NumColTiles(cols);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles, kMaxAmaxBlocks));
  const bool always = !Quantizes(out);
  error = Launch(GroupAmax<Loader>, blocks, kThreads, stream, loader, params, always);
  if (error != cudaSuccess || always) return error;
  return Launch(WriteGroups<Loader>, static_cast<unsigned>(num_tiles), kThreads, stream, loader, params);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUP_PASS_CUH_
