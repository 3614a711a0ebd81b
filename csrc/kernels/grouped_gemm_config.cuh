// The shape of one configuration of the grouped product, and which tiles its blocks work on. a is lhs, b is rhs.
#ifndef TE_JAX_KERNELS_GROUPED_GEMM_CONFIG_CUH_
#define TE_JAX_KERNELS_GROUPED_GEMM_CONFIG_CUH_

#include <cstdint>

#include "csrc/core/grouped_args.h"
#include "csrc/kernels/reduce.cuh"

namespace te_jax::kernels {

// What is ragged: the rows of a and of the result (fprop, dgrad), or what is contracted (wgrad).
enum class Ragged { kRows, kContraction };

// kColumnsA, kColumnsB: elements of that operand that are next to each other in memory are not contracted with each
// other (BF16 only). kFast: all products are added up by the tensor cores; otherwise each 128, and these in fp32.
// BF16 products are added up in fp32 by the tensor cores.
template <Ragged kRagged_, DType kA_, DType kB_, bool kColumnsA_, bool kColumnsB_, bool kFast_>
struct GroupedConfig {
  static constexpr Ragged kRagged = kRagged_;
  static constexpr DType kA = kA_, kB = kB_;
  static constexpr bool kColumnsA = kColumnsA_, kColumnsB = kColumnsB_, kFast = kFast_;
  static constexpr bool kBF16 = kA == DType::kBF16;
  static_assert(kFast || !kBF16);

  static constexpr int kM = 128, kN = 256;  // of a tile: each of two warpgroups has 64 rows, one more loads
  static constexpr int kK = kBF16 ? 64 : 128;  // of a stage: rows of 128 bytes
  static constexpr int kStepK = kK / 4;        // of one wgmma
  static constexpr int kThreads = 384, kMathThreads = 256;
  static constexpr int kMathRegisters = 232, kLoadRegisters = 40;

  static constexpr int kStages = 4;
  static constexpr int kBytesA = kM * 128, kBytesB = kN * 128, kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxBytes = 64 * 128;  // of an operand in columns: 64 of them by kK
  // Where contractions start, if that is along rows in memory: the copy engine takes only addresses that are
  // multiples of 16 bytes ("illegal instruction" otherwise, which no document says), and sectors have 32.
  static constexpr int kContractionAlign = kColumnsA ? 1 : 32;
  static constexpr int kRaster = 16;  // tiles along M that are worked on together, 2048 rows as are columns, for L2
  // 1024 to align: the swizzle is a function of the address.
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes;
};

struct GroupedParams {
  int tokens, m, n, k, groups;  // of m and k, the one that is not ragged
  const int32_t* group_sizes;
  const float *scale_a, *scale_b;      // null for BF16
  int scale_a_stride, scale_b_stride;  // from group to group: 0 or 1
  const void *bias, *c;                // null, or as in grouped_args.h
  bool bias_f32, out_f32;
  void* out;
};

// Where groups start, and their tiles if rows are ragged.
struct GroupTable {
  int start[kMaxGroups + 2];       // start[groups]: the end of the last one; start[groups + 1] = tokens
  int first_tile[kMaxGroups + 2];  // in tiles along M. Rows of no group are one group more

  // By one warp.
  __device__ void Fill(const GroupedParams& p, int tile_rows) {
    const int lane = threadIdx.x % kWarp;
    const auto limit = static_cast<uint32_t>(p.tokens);
    uint32_t row = 0, tile = 0;
    for (int first = 0; first <= p.groups; first += kWarp) {
      const int group = first + lane;
      uint32_t size = group < p.groups ? max(p.group_sizes[group], 0) : group == p.groups ? limit : 0;
      // Sums that are cut off at the number of tokens: GroupEnd.
      uint32_t end = min(size, limit);
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t before = __shfl_up_sync(kFullMask, end, offset);
        if (lane >= offset) end = min(end + before, limit);
      }
      end = min(end + row, limit);
      uint32_t start = __shfl_up_sync(kFullMask, end, 1);
      if (lane == 0) start = row;
      row = __shfl_sync(kFullMask, end, kWarp - 1);
      const uint32_t own_tiles = (end - start + tile_rows - 1) / tile_rows;
      uint32_t tiles = own_tiles;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t before = __shfl_up_sync(kFullMask, tiles, offset);
        if (lane >= offset) tiles += before;
      }
      tiles += tile;
      if (group <= p.groups) {
        Set(group, start, tiles - own_tiles);
        if (group == p.groups) Set(group + 1, end, tiles);
      }
      tile = __shfl_sync(kFullMask, tiles, kWarp - 1);
    }
  }

 private:
  __device__ void Set(int group, uint32_t row, uint32_t tile) {
    start[group] = static_cast<int>(row);
    first_tile[group] = static_cast<int>(tile);
  }
};

struct GroupedTile {
  int group;         // p.groups: rows of no group, which are 0
  int row, row_end;  // of a and of the result
  int column;
  int k_start, k_size;  // what is contracted
  int k_head;           // and how much of its start is of other groups
};

// The tiles of a block, in the order in which it works on them: by groups, in bands of kRaster tiles along M, within
// a band M fastest.
template <class Config>
class GroupedTiles {
 public:
  __device__ GroupedTiles(const GroupedParams& p, const GroupTable& table)
      : p_(p), table_(table), tiles_n_((p.n - 1) / Config::kN + 1), index_(blockIdx.x) {}

  __device__ bool Next(GroupedTile& tile) {
    if constexpr (Config::kRagged == Ragged::kRows) {
      while (index_ >= table_.first_tile[group_ + 1] * tiles_n_) {
        if (++group_ > p_.groups) return false;
      }
      const int first = table_.first_tile[group_];
      const int2 at = Place(index_ - first * tiles_n_, table_.first_tile[group_ + 1] - first);
      tile.group = group_;
      tile.row = table_.start[group_] + at.x * Config::kM;
      tile.row_end = table_.start[group_ + 1];
      tile.column = at.y * Config::kN;
      tile.k_start = 0;
      tile.k_size = group_ == p_.groups ? 0 : p_.k;
      tile.k_head = 0;
    } else {
      const int tiles_m = (p_.m - 1) / Config::kM + 1, of_group = tiles_m * tiles_n_;
      group_ = index_ / of_group;
      if (group_ >= p_.groups) return false;
      const int2 at = Place(index_ - group_ * of_group, tiles_m);
      tile.group = group_;
      tile.row = at.x * Config::kM;
      tile.row_end = p_.m;
      tile.column = at.y * Config::kN;
      const int start = table_.start[group_], end = table_.start[group_ + 1];
      tile.k_head = start == end ? 0 : start % Config::kContractionAlign;
      tile.k_start = start - tile.k_head;
      tile.k_size = end - tile.k_start;
    }
    index_ += gridDim.x;
    return true;
  }

 private:
  // Along M and N.
  __device__ int2 Place(int index, int tiles_m) const {
    const int band = index / (Config::kRaster * tiles_n_);
    const int height = min(Config::kRaster, tiles_m - band * Config::kRaster);
    const int rest = index - band * Config::kRaster * tiles_n_;
    return {band * Config::kRaster + rest % height, rest / height};
  }

  const GroupedParams& p_;
  const GroupTable& table_;
  const int tiles_n_;
  int index_, group_ = 0;
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_CONFIG_CUH_
