// A quantizing pass with a scale for each group of rows (QuantizedOut::groups), for the loaders of quantizing_pass.cuh
// and in their tiles. A tile may hold rows of many groups: every row looks up its own, and what is found for a group (amax)
// meets in one word of memory, as an integer maximum, whose order doesn't matter.
//
// Kernels on the stream, in this order:
//   StartGroups   one block: where each group ends, and whether any scale has to be derived; zeroes the maxima
//   GroupAmax     if an amax is wanted alone or a scale may be derived; its blocks return at once if none has to be
//   WriteGroups   if data or data_t is wanted; takes the amax too, unless the kernel before has
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
  uint32_t* derives;  // [1]: whether any scale is derived from its group's amax
};

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
    derives |= params.scale[g] == 0.0f;
  }
  derives = __syncthreads_or(derives);
  if (threadIdx.x == 0) *params.derives = derives;
}

// The group of a row; `groups` for one that belongs to none.
__device__ inline int64_t GroupOf(const GroupParams& params, int64_t row) {
  if (row >= params.rows) return params.groups;
  if (params.group_rows > 0) return row / params.group_rows;
  int64_t low = 0, high = params.groups;  // the first group that ends behind the row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (params.ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The groups of this thread's rows. Empty groups lie between neighbouring rows, so all but the first are searched too.
struct RowGroups {
  int64_t group[kRowsPerThread];
  __device__ RowGroups(const GroupParams& params, const Place& at) {
    group[0] = GroupOf(params, at.row);
#pragma unroll
    for (int r = 1; r < kRowsPerThread; ++r) {
      const int64_t row = at.row + r, last = group[r - 1];
      const bool same = row < params.rows && last < params.groups && params.group_rows == 0 && row < params.ends[last];
      group[r] = same ? last : GroupOf(params, row);
    }
  }
};

// The maxima of the tile's rows, each [kRowsPerThread] of a thread, into those of their groups.
__device__ inline void AddMaxima(const GroupParams& params, const float (&row_amax)[kRowsPerThread],
                                 const RowGroups& groups, uint32_t* maxima) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    // The lanes of a warp hold 4 groups of 4 rows in 8 chunks: those of one row, then those of one group of tokens.
    uint32_t bits = __float_as_uint(row_amax[r]);
    const int group = static_cast<int>(groups.group[r]);
    const unsigned mask = __match_any_sync(kFullMask, group);
    bits = __reduce_max_sync(mask, bits);
    const bool leads = static_cast<int>(threadIdx.x % kWarp) == __ffs(mask) - 1;
    if (leads && group < params.groups && bits != 0) atomicMax(maxima + group, __float_as_uint(AmaxFromBits(bits)));
  }
}

template <class Loader>
__global__ void __launch_bounds__(kThreads) GroupAmax(Loader loader, GroupParams params, bool always) {
  AwaitPredecessor();
  if (!always && *params.derives == 0) return;
  const int64_t num_tiles = NumRowTiles(params.rows) * NumColTiles(params.cols);
  for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const Place at(index, params.cols);
    const Operands<Loader> operands(loader, at, params.rows, params.cols);
    const RowGroups groups(params, at);
    float row_amax[kRowsPerThread] = {};
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (groups.group[r] >= params.groups || at.col >= params.cols) continue;
      float y[Loader::kOutputs][kChunk];
      loader.Compute(at.row + r, operands.fragment[r], operands.column, y);
#pragma unroll
      for (int plane = 0; plane < Loader::kOutputs; ++plane) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) row_amax[r] = MaxMagnitude(row_amax[r], y[plane][i]);
      }
    }
    AddMaxima(params, row_amax, groups, params.maxima);
  }
}

__device__ inline float ScaleOfGroup(const GroupParams& params, int64_t group) {
  float scale = params.scale[group];
  if (scale == 0.0f) {
    scale = ScaleFromAmax(__uint_as_float(params.maxima[group]), params.format_max, params.margin, params.power_of_two);
  }
  return scale > 0.0f ? scale : __uint_as_float(kNaNBits);  // a broken state must be loud
}

// Writes the tile's columns as rows of data_t. A unit of 16 rows lies in one group where each has a copy of its own.
__device__ inline void WriteTransposedGroups(const TransposedTile& tile, const Place& at, const GroupParams& params,
                                             int64_t plane_cols_before) {
  const int unit = threadIdx.x % kUnitsPerTile;
  const int64_t row = at.tile_row + unit * kUnit;
  const bool ragged = params.group_rows == 0;
  const int64_t length = ragged ? PaddedTokens(params.rows) : params.group_rows;
  if (row >= (ragged ? length : params.rows)) return;
  const int64_t group = ragged ? 0 : row / params.group_rows;
  uint8_t* to = params.data_t + (group * params.cols + plane_cols_before) * length + (row - group * length);
#pragma unroll
  for (int column = threadIdx.x / kUnitsPerTile; column < kTileCols; column += kThreads / kUnitsPerTile) {
    if (at.tile_col + column >= params.cols) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(&tile[column][(unit ^ (column / kChunk)) * 4]);
    *reinterpret_cast<uint4*>(to + (at.tile_col + column) * length) = value;
  }
}

template <class Loader>
__global__ void __launch_bounds__(kThreads) WriteGroups(Loader loader, GroupParams params) {
  constexpr int kPlanes = Loader::kOutputs;
  __shared__ alignas(16) TransposedTile tiles[kPlanes];
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
  const RowGroups groups(params, at);
  float row_amax[kRowsPerThread] = {};
  uint32_t words[kPlanes][kRowsPerThread][kWords] = {};
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const bool inside = at.row + r < params.rows && at.col < params.cols, belongs = groups.group[r] < params.groups;
    float y[kPlanes][kChunk] = {};
    if (inside && belongs) loader.Compute(at.row + r, operands.fragment[r], operands.column, y);
    const float scale = belongs ? ScaleOfGroup(params, groups.group[r]) : 1.0f;
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
  if (params.amax != nullptr && *params.derives == 0) AddMaxima(params, row_amax, groups, params.maxima);
  if (params.data_t == nullptr) return;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) StoreTransposed(words[plane], at, tiles[plane]);
  __syncthreads();
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    WriteTransposedGroups(tiles[plane], at, params, plane * params.cols);
  }
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
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles, kMaxPartials));
  const bool always = !Quantizes(out);
  error = Launch(GroupAmax<Loader>, blocks, kThreads, stream, loader, params, always);
  if (error != cudaSuccess || always) return error;
  return Launch(WriteGroups<Loader>, static_cast<unsigned>(num_tiles), kThreads, stream, loader, params);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUP_PASS_CUH_
