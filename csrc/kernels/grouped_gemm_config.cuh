// The shape of one configuration of the grouped product, and which tiles its blocks work on. a is lhs, b is rhs.
#ifndef TE_JAX_KERNELS_GROUPED_GEMM_CONFIG_CUH_
#define TE_JAX_KERNELS_GROUPED_GEMM_CONFIG_CUH_

#include <climits>
#include <cstdint>

#include "csrc/core/grouped_args.h"
#include "csrc/kernels/reduce.cuh"

namespace te_jax::kernels {

// What is ragged: the rows of a and of the result (fprop, dgrad), or what is contracted (wgrad).
enum class Ragged { kRows, kContraction };

// kColumnsA, kColumnsB: elements of that operand that are next to each other in memory are not contracted with each
// other (BF16 only). kFast: all products are added up by the tensor cores; otherwise each 128, and these in fp32.
// BF16 products are added up in fp32 by the tensor cores.
// kCluster: blocks that work on neighbouring tiles and share half of what they load, 1 or 2.
template <Ragged kRagged_, DType kA_, DType kB_, bool kColumnsA_, bool kColumnsB_, bool kFast_, int kCluster_>
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

  static constexpr int kCluster = kCluster_;
  static constexpr int kPartM = kM / kCluster, kPartN = kN / kCluster;  // rows of a and b that a load brings
  static constexpr int kRaster = 16 / kCluster;  // works along M that are done together, 2048 rows, for L2

  static constexpr int kStages = 4;
  static constexpr int kBytesA = kM * 128, kBytesB = kN * 128, kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxBytes = 64 * 128;  // of an operand in columns: 64 of them by kK
  // Where contractions start, if that is along rows in memory: the copy engine takes only addresses that are
  // multiples of 16 bytes (otherwise: "illegal instruction"), and sectors have 32.
  static constexpr int kContractionAlign = kColumnsA ? 1 : 32;
  // 1024 to align: the swizzle is a function of the address.
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes;

  // What is added to the products of a tile (c) comes in stages behind theirs, in boxes of kM rows of 128 bytes.
  static constexpr int kBoxBytesC = kM * 128, kBoxesC = kStageBytes / kBoxBytesC;
  template <class Out>
  static constexpr int kColumnsC = 128 / sizeof(Out);  // of a box
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

// How many works a matrix has: what a cluster does at a time. That is a tile for one block. For two blocks it is two
// tiles along M, which have b in common; if there is an odd one along M, two of these along N, which have a in common.
template <class Config>
__device__ __host__ constexpr int64_t WorksOf(int64_t tiles_m, int64_t tiles_n) {
  static_assert(Config::kCluster == 1 || Config::kCluster == 2);
  if (Config::kCluster == 1) return tiles_m * tiles_n;
  return tiles_m / 2 * tiles_n + tiles_m % 2 * ((tiles_n + 1) / 2);
}

// Where groups start, and their works if rows are ragged.
struct GroupTable {
  int start[kMaxGroups + 2];       // start[groups]: the end of the last one; start[groups + 1] = tokens
  int first_work[kMaxGroups + 2];  // rows of no group are one group more

  // By one warp.
  template <class Config>
  __device__ void Fill(const GroupedParams& p) {
    const int tiles_n = (p.n - 1) / Config::kN + 1;
    const int lane = threadIdx.x % kWarp;
    const auto limit = static_cast<uint32_t>(p.tokens);
    uint32_t row = 0, work = 0;
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
      const auto own = static_cast<uint32_t>(WorksOf<Config>((end - start + Config::kM - 1) / Config::kM, tiles_n));
      uint32_t works = own;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t before = __shfl_up_sync(kFullMask, works, offset);
        if (lane >= offset) works += before;
      }
      works += work;
      if (group <= p.groups) {
        Set(group, start, works - own);
        if (group == p.groups) Set(group + 1, end, works);
      }
      work = __shfl_sync(kFullMask, works, kWarp - 1);
    }
  }

 private:
  __device__ void Set(int group, uint32_t row, uint32_t work) {
    start[group] = static_cast<int>(row);
    first_work[group] = static_cast<int>(work);
  }
};

struct GroupedTile {
  int group;         // p.groups: rows of no group, which are 0
  int row, row_end;  // of a and of the result
  int column;
  int k_start, k_size;  // what is contracted
  int k_head;           // and how much of its start is of other groups
  bool share_b;         // with the other block of the cluster; else a
};

// The tiles of a block, in the order in which it works on them: by groups, in bands of kRaster works along M, within
// a band M fastest.
template <class Config>
class GroupedTiles {
 public:
  __device__ GroupedTiles(const GroupedParams& p, const GroupTable& table)
      : p_(p), table_(table), tiles_n_((p.n - 1) / Config::kN + 1), index_(blockIdx.x / kCluster) {
    if constexpr (kRows) {
      const int works = table.first_work[p.groups + 1], clusters = gridDim.x / kCluster;
      if (works % clusters * 2 <= clusters) split_ = works - works % clusters;
    }
  }

  __device__ bool Next(GroupedTile& tile) {
    if constexpr (kRows) {
      const int half = index_ < split_ ? -1 : (index_ - split_) % 2;
      if (half >= 0) index_ = split_ + (index_ - split_) / 2;
      while (index_ >= table_.first_work[group_ + 1]) {
        if (++group_ > p_.groups) return false;
      }
      const int start = table_.start[group_];
      tile.row_end = table_.start[group_ + 1];
      Place(tile, index_ - table_.first_work[group_], (tile.row_end - start - 1) / Config::kM + 1);
      tile.row += start;
      if (half >= 0) {
        tile.row += half * Config::kM / 2;
        tile.row_end = min(tile.row_end, tile.row + Config::kM / 2);
        if (!tile.share_b && tile.row >= tile.row_end) return false;  // else the other block may have rows
        index_ = INT_MAX / 2;
      }
      tile.k_start = tile.k_head = 0;
      tile.k_size = group_ == p_.groups ? 0 : p_.k;
    } else {
      const int tiles_m = (p_.m - 1) / Config::kM + 1;
      const auto of_group = static_cast<int>(WorksOf<Config>(tiles_m, TilesN()));
      group_ = index_ / of_group;
      if (group_ >= p_.groups) return false;
      tile.row_end = p_.m;
      Place(tile, index_ - group_ * of_group, tiles_m);
      const int start = table_.start[group_], end = table_.start[group_ + 1];
      tile.k_head = start == end ? 0 : start % Config::kContractionAlign;
      tile.k_start = start - tile.k_head;
      tile.k_size = end - tile.k_start;
    }
    tile.group = group_;
    index_ += gridDim.x / kCluster;
    return true;
  }

 private:
  static constexpr bool kRows = Config::kRagged == Ragged::kRows;
  static constexpr int kCluster = Config::kCluster;

  // With ragged rows there is no register to keep it in; otherwise ptxas has what follows from it in uniform registers
  // only if it is kept.
  __device__ int TilesN() const { return kRows ? (p_.n - 1) / Config::kN + 1 : tiles_n_; }
  // This block's tile of a work of a matrix that has `tiles_m` rows of tiles.
  __device__ void Place(GroupedTile& tile, int work, int tiles_m) const {
    const int rank = blockIdx.x % kCluster, works_m = tiles_m / kCluster, tiles_n = TilesN();
    tile.share_b = kCluster == 1 || work < works_m * tiles_n;
    int row, column;
    if (tile.share_b) {
      const int band = work / (Config::kRaster * tiles_n);
      const int height = min(Config::kRaster, works_m - band * Config::kRaster);
      const int rest = work - band * Config::kRaster * tiles_n;
      row = kCluster * (band * Config::kRaster + rest % height) + rank;
      column = rest / height;
    } else {
      row = tiles_m - 1;
      column = 2 * (work - works_m * tiles_n) + rank;
    }
    tile.row = row * Config::kM;
    tile.column = column * Config::kN;
  }

  const GroupedParams& p_;
  const GroupTable& table_;
  const int tiles_n_;
  // Works from here on are the last round. If half of the clusters or more would do nothing then, each gets the upper
  // or the lower halves of a work's tiles.
  int split_ = INT_MAX;
  int index_, group_ = 0;
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_CONFIG_CUH_
