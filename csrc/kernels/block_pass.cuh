// The end of a quantizing pass in block scaling: every block of y is cast with the scale of its own amax. One read of
// the operands, one write of each result, in tiles of 128 x 128, so that a block of each kind lies in one tile:
//
//   data   1x128 blocks along the columns: 16 lanes of a warp hold one
//   data_t 1x128 blocks along the rows of a group (QuantizedOut), cast again with their own scales; transposed in
//          shared memory
//   both   128x128 blocks: one scale for the tile
//
// y comes from the loaders of quantizing_pass.cuh and stays in registers, in its own dtype, until all amaxes are known.
// A loader whose y is what it reads may have `const Chunk<T, kChunk>& Raw(const Fragment&) const`.
#ifndef TE_JAX_KERNELS_BLOCK_PASS_CUH_
#define TE_JAX_KERNELS_BLOCK_PASS_CUH_

#include <type_traits>

#include "csrc/kernels/block_tile.cuh"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {

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

template <class Loader, class = void>
struct HasRaw : std::false_type {};
template <class Loader>
struct HasRaw<Loader, std::void_t<decltype(&Loader::Raw)>> : std::true_type {};

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

template <class Loader, class Geometry, bool kSquare, bool kDbias>
__global__ void __launch_bounds__(Geometry::kTileThreads, Geometry::kBlocksPerSM)
    BlockKernel(Loader loader, BlockParams params) {
  using T = typename Loader::Element;
  using M = Magnitudes<T>;
  constexpr int kPlanes = Loader::kOutputs, kRows = Geometry::kRows;
  constexpr bool kRaw = HasRaw<Loader>::value;
  __shared__ BlockMemory<Geometry> memory;
  AwaitPredecessor();

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

// A thread of 256 has twice the rows of one of 512. Measured on an H200 with one 16-bit operand that is 9% faster
// (quantize) or 5% (gelu); with two operands in registers it makes no difference (swiglu) or is 13% slower (dgelu).
template <class Loader>
struct DefaultGeometryOf {
  using Element = typename Loader::Element;
  static constexpr bool kIsHalf = sizeof(Element) == 2;
  static constexpr bool kOneOperand = sizeof(typename Loader::Fragment) < 2 * sizeof(Chunk<Element, kChunk>);
  using type = std::conditional_t<Loader::kOutputs == 1 && kIsHalf && kOneOperand, BlockGeometry<256, 3>,
                                  BlockGeometry<512, Loader::kOutputs == 1 && kIsHalf ? 2 : 1>>;
};
template <class Loader>
using DefaultGeometry = typename DefaultGeometryOf<Loader>::type;

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
  auto kernel =
      out.dbias == nullptr ? BlockKernel<Loader, Geometry, false, false> : BlockKernel<Loader, Geometry, false, true>;
  if constexpr (HasRaw<Loader>::value) {  // quantize: nothing else takes 128x128 blocks (csrc/ffi/quantize.cc)
    if (square) {
      kernel =
          out.dbias == nullptr ? BlockKernel<Loader, Geometry, true, false> : BlockKernel<Loader, Geometry, true, true>;
    }
  } else if (square) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t error = Launch(kernel, tiles, Geometry::kTileThreads, stream, loader, params);
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
