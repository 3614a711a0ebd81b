// The pass that quantize, norm, activation and activation_grad all end in: produce y tile by tile, and write what is
// wanted of it (QuantizedOut) while it is in registers. One read of the operands, one write of each result.
//
// A loader says what y is:
//   using Element = float | BF16 | F16;          // dtype of the operands and of hp
//   static constexpr int kOutputs;               // y is kOutputs planes of [rows, cols] side by side
//   struct Fragment, Column;                     // operands of one chunk; what depends on its columns alone
//   void Load(int64_t row, int64_t col, Fragment&) const;
//   void LoadColumn(int64_t col, Column&) const;
//   void Compute(int64_t row, const Fragment&, const Column&, float (&y)[kOutputs][kChunk]) const;  // rounded to
//   Element
//
// Kernels on the stream, in this order (everything stays on the device, the host never waits):
//   AmaxKernel    if y is quantized: its blocks return at once unless the scale operand is 0; also zeroes amax
//   WriteKernel   reduces the partial maxima to a scale if the scale operand is 0, then writes
//   DbiasKernel   sums the tiles' column sums, in a fixed order
// An amax alone is AmaxKernel and FinishAmaxKernel. Each is launched while the one before it ends (launch.cuh).
#ifndef TE_JAX_KERNELS_QUANTIZING_PASS_CUH_
#define TE_JAX_KERNELS_QUANTIZING_PASS_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "csrc/core/args.h"
#include "csrc/core/fp8.h"
#include "csrc/core/scale.h"
#include "csrc/kernels/fp8.cuh"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/reduce.cuh"
#include "csrc/kernels/vector.cuh"
#include "csrc/kernels/workspace.h"

namespace te_jax::kernels {

constexpr int kChunk = 8;          // columns of a thread: one 16-byte load of a 16-bit dtype
constexpr int kRowsPerThread = 4;  // a 4 x 4 byte transpose makes whole words of a column
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunksPerTile = kTileCols / kChunk;
constexpr int kWords = kChunk / 4;  // of FP8 of a chunk
constexpr int kUnit = 16;           // rows of a column that are written at once
constexpr int kUnitsPerTile = kTileRows / kUnit;
static_assert(kThreads * kRowsPerThread * kChunk == kTileRows * kTileCols);
static_assert(kChunksPerTile == kUnitsPerTile, "the swizzle of the transposed tile pairs them");

using TransposedTile = uint32_t[kTileCols][kTileRows / 4];

// What the kernels need of QuantizedOut.
struct PassParams {
  int64_t rows, cols;  // of one plane
  const float* scale;
  float format_max;
  int32_t margin;
  bool power_of_two, e5m2, quantizes;
  void* hp;
  uint8_t* data;
  uint8_t* data_t;
  float *scale_used, *scale_inv, *amax;
  float* tile_sums;          // [row tiles, planes * cols], or null
  const uint32_t* partials;  // [num_partials]: maxima by the blocks of the kernel before
  int num_partials;
};

// The place of this thread in tile number `index`, tiles of one row of tiles being consecutive.
struct Place {
  int chunk, group;  // of 8 chunks, of 32 groups of 4 rows
  int64_t tile_row, tile_col, row, col;
  __device__ Place(int64_t index, int64_t cols) {
    const int64_t tiles_per_row = NumColTiles(cols);
    chunk = threadIdx.x % kChunksPerTile;
    group = threadIdx.x / kChunksPerTile;
    tile_row = index / tiles_per_row * kTileRows;
    tile_col = index % tiles_per_row * kTileCols;
    row = tile_row + kRowsPerThread * group;
    col = tile_col + kChunk * chunk;
  }
};

template <class Loader>
struct Operands {
  typename Loader::Fragment fragment[kRowsPerThread];
  typename Loader::Column column;

  // All loads are issued before the first use.
  __device__ Operands(const Loader& loader, const Place& at, int64_t rows, int64_t cols) {
    if (at.col >= cols) return;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (at.row + r < rows) loader.Load(at.row + r, at.col, fragment[r]);
    }
    loader.LoadColumn(at.col, column);
  }
};

template <class Loader>
__global__ void __launch_bounds__(kThreads)
    AmaxKernel(Loader loader, int64_t rows, int64_t cols, const float* only_if_zero, uint32_t* partials,
               float* amax_to_zero) {
  __shared__ uint32_t scratch[kWarps];
  AwaitPredecessor();
  if (amax_to_zero != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *amax_to_zero = 0.0f;
  if (only_if_zero != nullptr && *only_if_zero != 0.0f) return;
  const int64_t num_tiles = NumRowTiles(rows) * NumColTiles(cols);
  float amax = 0.0f;
  for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const Place at(index, cols);
    const Operands<Loader> operands(loader, at, rows, cols);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (at.row + r >= rows || at.col >= cols) continue;
      float y[Loader::kOutputs][kChunk];
      loader.Compute(at.row + r, operands.fragment[r], operands.column, y);
#pragma unroll
      for (int plane = 0; plane < Loader::kOutputs; ++plane) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) amax = MaxMagnitude(amax, y[plane][i]);
      }
    }
  }
  const uint32_t bits = BlockMax<kThreads>(__float_as_uint(amax), scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = bits;
}

__device__ inline uint32_t ReducePartials(const uint32_t* partials, int num_partials, uint32_t* scratch) {
  uint32_t bits = 0;
  for (int i = threadIdx.x; i < num_partials; i += kThreads) bits = max(bits, partials[i]);
  return BlockMax<kThreads>(bits, scratch);
}

// Transposes 4 rows x 8 columns of bytes into words of 4 rows, and puts them at their columns of the shared tile.
// A word lies in 16-byte unit (row / 16) ^ (chunk of its column): conflict-free for this store, where a warp has 16
// rows of 8 chunks, and for the 16-byte reads along a column.
__device__ inline void StoreTransposed(const uint32_t (&words)[kRowsPerThread][kWords], const Place& at,
                                       TransposedTile& tile) {
  const int slot = ((at.group / 4) ^ at.chunk) * 4 + at.group % 4;
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

// Writes the tile's columns as rows of data_t [cols, rows]; rows is a multiple of 16 where data_t is wanted.
__device__ inline void WriteTransposed(const TransposedTile& tile, const Place& at, int64_t rows, int64_t cols,
                                       uint8_t* data_t) {
  const int unit = threadIdx.x % kUnitsPerTile;
  const int64_t row = at.tile_row + unit * kUnit;
#pragma unroll
  for (int column = threadIdx.x / kUnitsPerTile; column < kTileCols; column += kThreads / kUnitsPerTile) {
    if (at.tile_col + column >= cols || row >= rows) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(&tile[column][(unit ^ (column / kChunk)) * 4]);
    *reinterpret_cast<uint4*>(data_t + (at.tile_col + column) * rows + row) = value;
  }
}

// The block's part of the column sums: over the 4 rows of a thread, the 4 groups of a warp, the 8 warps.
__device__ inline void WriteTileSums(float (&sums)[kChunk], const Place& at, int64_t cols,
                                     float (&scratch)[kWarps][kTileCols], float* tile_sums) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    sums[i] += __shfl_xor_sync(kFullMask, sums[i], kChunksPerTile);
    sums[i] += __shfl_xor_sync(kFullMask, sums[i], 2 * kChunksPerTile);
  }
  if (threadIdx.x % kWarp < kChunksPerTile) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) scratch[threadIdx.x / kWarp][at.chunk * kChunk + i] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x < kTileCols && at.tile_col + threadIdx.x < cols) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += scratch[warp][threadIdx.x];
    tile_sums[at.tile_col + threadIdx.x] = sum;
  }
  __syncthreads();  // scratch may be written again
}

// The scale to quantize with, and whether it is derived from this tensor's amax (as bits). For the whole block; one
// block of the pass `publishes` it.
struct Scale {
  float value;
  bool derived;
  uint32_t amax_bits;
  __device__ Scale(const PassParams& params, bool publishes, uint32_t* scratch)
      : value(*params.scale), derived(false), amax_bits(0) {
    if (!params.quantizes) return;
    derived = value == 0.0f;
    if (derived) {
      amax_bits = ReducePartials(params.partials, params.num_partials, scratch);
      value = ScaleFromAmax(AmaxFromBits(amax_bits), params.format_max, params.margin, params.power_of_two);
    }
    if (!(value > 0.0f)) value = __uint_as_float(kNaNBits);  // a broken state must be loud
    if (!publishes || threadIdx.x != 0) return;
    *params.scale_used = value;
    *params.scale_inv = __fdiv_rn(1.0f, value);
    if (params.amax != nullptr && derived) *params.amax = AmaxFromBits(amax_bits);
  }
};

template <class Loader>
struct TileMemory {
  alignas(16) TransposedTile tiles[Loader::kOutputs];
  float sums[kWarps][kTileCols];
  uint32_t maxima[kWarps];
};

template <class Loader>
constexpr int kBlocksPerSM = Loader::kOutputs == 1 ? 4 : 3;  // as many as registers are left for

// Writes what is wanted of the tile. kDbias: column sums are wanted; they cost registers and an addition for each
// element.
template <class Loader, bool kDbias>
__device__ inline void WriteTile(const Loader& loader, const PassParams& params, const Place& at,
                                 const Operands<Loader>& operands, bool publishes, TileMemory<Loader>& memory) {
  using T = typename Loader::Element;
  constexpr int kPlanes = Loader::kOutputs;
  const int64_t rows = params.rows, cols = params.cols, row_length = kPlanes * cols;
  const Scale scale(params, publishes, memory.maxima);

  float amax = 0.0f;
  uint32_t words[kPlanes][kRowsPerThread][kWords];
  float sums[kPlanes][kChunk] = {};
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float y[kPlanes][kChunk] = {};
    const bool inside = at.row + r < rows && at.col < cols;
    if (inside) loader.Compute(at.row + r, operands.fragment[r], operands.column, y);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      float magnitude = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        magnitude = MaxMagnitude(magnitude, y[plane][i]);
        if constexpr (kDbias) sums[plane][i] += y[plane][i];
      }
      amax = MaxMagnitude(amax, magnitude);
      const int64_t offset = (at.row + r) * row_length + plane * cols + at.col;
      if (params.hp != nullptr && inside) StoreRounded(y[plane], static_cast<T*>(params.hp) + offset);
      if (!params.quantizes) continue;
      float scaled[kChunk];
      ScaleForCast(y[plane], magnitude, scale.value, scaled);
#pragma unroll
      for (int j = 0; j < kWords; ++j) words[plane][r][j] = CastFour(scaled + 4 * j, params.e5m2);
      if (params.data != nullptr && inside) {
        *reinterpret_cast<uint2*>(params.data + offset) = make_uint2(words[plane][r][0], words[plane][r][1]);
      }
    }
  }

#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    if (params.data_t != nullptr) StoreTransposed(words[plane], at, memory.tiles[plane]);
    if constexpr (kDbias) {
      float* tile_sums = params.tile_sums + at.tile_row / kTileRows * row_length + plane * cols;
      WriteTileSums(sums[plane], at, cols, memory.sums, tile_sums);
    }
  }
  if (params.amax != nullptr && !scale.derived) {
    const uint32_t bits = BlockMax<kThreads>(__float_as_uint(amax), memory.maxima);
    // Started from the 0 that the kernel before wrote.
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(params.amax), __float_as_uint(AmaxFromBits(bits)));
  }
  if (params.data_t != nullptr) {
    __syncthreads();
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      WriteTransposed(memory.tiles[plane], at, rows, cols, params.data_t + plane * cols * rows);
    }
  }
}

template <class Loader, bool kDbias>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<Loader>) WriteKernel(Loader loader, PassParams params) {
  __shared__ TileMemory<Loader> memory;
  AwaitPredecessor();
  // From the end: what an amax or statistics pass has read last is still in the L2 cache.
  const Place at(gridDim.x - 1 - blockIdx.x, params.cols);
  const Operands<Loader> operands(loader, at, params.rows, params.cols);
  WriteTile<Loader, kDbias>(loader, params, at, operands, blockIdx.x == 0, memory);
}

// Defined in quantizing_pass.cu: they do not depend on the loader.
cudaError_t LaunchFinishAmax(const QuantizedOut& out, const PassWorkspace& workspace, cudaStream_t stream);
cudaError_t LaunchDbias(int64_t num_row_tiles, int64_t cols, const float* tile_sums, const QuantizedOut& out,
                        cudaStream_t stream);

inline PassParams MakePassParams(int64_t rows, int64_t cols, const QuantizedOut& out, const PassWorkspace& workspace) {
  PassParams params{};
  params.rows = rows;
  params.cols = cols;
  params.scale = out.scale;
  params.format_max = FP8Max(out.format);
  params.margin = out.margin;
  params.power_of_two = out.power_of_two;
  params.e5m2 = out.format == DType::kE5M2;
  params.quantizes = Quantizes(out);
  params.hp = out.hp;
  params.data = static_cast<uint8_t*>(out.data);
  params.data_t = static_cast<uint8_t*>(out.data_t);
  params.scale_used = out.scale_used;
  params.scale_inv = out.scale_inv;
  params.amax = out.amax;
  params.tile_sums = out.dbias == nullptr ? nullptr : workspace.tile_sums;
  params.partials = workspace.partials;
  params.num_partials = workspace.num_partials;
  return params;
}

// Instead of all that, in block scaling (block_pass.cuh).
template <class Loader>
cudaError_t LaunchBlockPass(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out, float* tile_sums,
                            cudaStream_t stream);

// Queues WriteKernel and DbiasKernel, or FinishAmaxKernel where only amax is wanted. `workspace.partials` holds the
// maxima already, and amax is 0 already.
template <class Loader>
cudaError_t LaunchWrite(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out,
                        const PassWorkspace& workspace, cudaStream_t stream) {
  if (out.scaling != Scaling::kTensor) return LaunchBlockPass(loader, rows, cols, out, workspace.tile_sums, stream);
  if (!WritesTiles(out)) return LaunchFinishAmax(out, workspace, stream);
  const auto num_tiles = static_cast<unsigned>(NumRowTiles(rows) * NumColTiles(cols));
  const PassParams params = MakePassParams(rows, cols, out, workspace);
  if (out.dbias == nullptr) {
    return Launch(WriteKernel<Loader, false>, num_tiles, kThreads, stream, loader, params);
  }
  const cudaError_t error = Launch(WriteKernel<Loader, true>, num_tiles, kThreads, stream, loader, params);
  if (error != cudaSuccess) return error;
  return LaunchDbias(NumRowTiles(rows), Loader::kOutputs * cols, workspace.tile_sums, out, stream);
}

// The whole pass over y [rows, kOutputs * cols].
template <class Loader>
cudaError_t LaunchQuantizingPass(const Loader& loader, int64_t rows, int64_t cols, const QuantizedOut& out,
                                 void* memory, cudaStream_t stream) {
  PassWorkspace workspace(rows, Loader::kOutputs * cols, out, memory);
  workspace.num_partials = static_cast<int>(std::min<int64_t>(NumRowTiles(rows) * NumColTiles(cols), kMaxPartials));
  const AmaxNeed need = NeedOfAmax(out);
  if (need != AmaxNeed::kNone) {
    // Where amax is taken while writing, the pass before it only zeroes it.
    const int64_t amax_rows = need == AmaxNeed::kZero ? 0 : rows;
    const int blocks = need == AmaxNeed::kZero ? 1 : workspace.num_partials;
    const float* only_if_zero = need == AmaxNeed::kAlways ? nullptr : out.scale;
    const cudaError_t error = Launch(AmaxKernel<Loader>, blocks, kThreads, stream, loader, amax_rows, cols,
                                     only_if_zero, workspace.partials, out.amax);
    if (error != cudaSuccess) return error;
  }
  return LaunchWrite(loader, rows, cols, out, workspace, stream);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_QUANTIZING_PASS_CUH_
