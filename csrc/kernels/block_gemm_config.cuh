// The shape of one configuration of the block-scaled product, and which tiles its blocks work on.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_CONFIG_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_CONFIG_CUH_

#include <cuda_bf16.h>

#include <cstdint>

namespace te_jax::kernels {

constexpr int kBlockK = 128;  // the extent of a scale along K, and a row of a tile: 128 bytes

// kGroups warpgroups multiply, each kWaves times 64 rows; a tile is kGroups * kWaves * 64 rows by 128 columns.
// kCluster blocks share A (neighbours along N) or B (neighbours along M).
// kVectorB: b has a scale per row and K block (1 x 128); else per 128 rows and K block.
// kPartials: accumulators of one K block per warpgroup; 2 keep the tensor cores busy while one of them is promoted.
// kAhead: of a 1 x 128 scaled b, the pairs of column scales (of a thread's 16) that are read while products are waited
// for.
// kOrdered: two warpgroups issue their products in turn.
template <int kGroups_, int kWaves_, int kStages_, int kCluster_, bool kShareA_, bool kVectorB_, int kPartials_ = 1,
          int kAhead_ = 0, bool kOrdered_ = false, class Out_ = __nv_bfloat16>
struct BlockGemmConfig {
  static constexpr int kGroups = kGroups_, kWaves = kWaves_, kStages = kStages_, kCluster = kCluster_;
  static constexpr bool kShareA = kShareA_, kVectorB = kVectorB_, kOrdered = kOrdered_;
  static constexpr int kPartials = kPartials_, kAhead = kVectorB ? kAhead_ : 0;
  using Out = Out_;

  static constexpr int kM = kGroups * kWaves * 64, kN = 128;
  static constexpr int kThreads = (kGroups + 1) * 128;
  // Registers of a thread: what is compiled for at entry, 65536 / kThreads, is dealt out anew between the roles.
  static constexpr int kMathRegisters = kGroups == 3 ? 160 : 232;
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : 40;

  static constexpr int kBytesA = kM * kBlockK, kBytesB = kN * kBlockK;
  static constexpr int kBytesScaleA = kM * 4, kBytesScaleB = kVectorB ? kN * 4 : 0;
  static constexpr int kStageBytes = kBytesA + kBytesB + kBytesScaleA + kBytesScaleB;
  static constexpr int kBarrierBytes = 2 * kStages * 8;
  // 1024 to align: the swizzle is a function of the address.
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kBarrierBytes;

  static constexpr int kBoxRowsA = kM / (kShareA ? kCluster : 1), kBoxRowsB = kN / (kShareA ? 1 : kCluster);
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(kPartials == 1 || kWaves == 1);
  static_assert(!kOrdered || kGroups == 2);
  static_assert(kAhead >= 0 && kAhead <= kN / 8);
  static_assert(kM <= 256);
  static_assert(kSharedBytes <= 227 * 1024);
};

struct BlockGemmParams {
  int m, n, k_blocks;
  int64_t ld_out;
  void* out;
  const float* scale_b;  // [ceil(n / 128), ld_scale_b], read here unless kVectorB
  int ld_scale_b;
  int raster;  // tiles (of clusters) along M that are worked on together, for the sake of the L2 cache
};

// Which tiles a cluster works on: bands of `raster` tiles along M, within a band M fastest.
struct BlockGemmTiles {
  int tiles_m, tiles_n, raster;

  template <class Config>
  __device__ static BlockGemmTiles Of(const BlockGemmParams& p) {
    constexpr int kAlongM = Config::kShareA ? 1 : Config::kCluster, kAlongN = Config::kShareA ? Config::kCluster : 1;
    constexpr int kM = Config::kM * kAlongM, kN = Config::kN * kAlongN;
    return {(p.m + kM - 1) / kM, (p.n + kN - 1) / kN, p.raster};
  }
  __device__ int Count() const { return tiles_m * tiles_n; }
  __device__ int2 At(int index) const {
    const int band = index / (raster * tiles_n);
    const int height = min(raster, tiles_m - band * raster);
    const int rest = index - band * raster * tiles_n;
    return {band * raster + rest % height, rest / height};
  }
};

// Place in the ring of stages.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_CONFIG_CUH_
