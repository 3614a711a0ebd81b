// The shape of one configuration of the block-scaled product, and which tiles its blocks work on. a is lhs, b is rhs.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_CONFIG_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_CONFIG_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "csrc/kernels/ring.cuh"

namespace te_jax::kernels {

constexpr int kBlockK = 128;  // the extent of a scale along K, and a row of a tile: 128 bytes

// A tile is kM rows by 128 columns.
// kVectorB: b has a scale per row and K block (1x128); else per 128 rows and K block.
template <int kM_, bool kVectorB_, class Out_>
struct BlockGemmConfig {
  static constexpr int kM = kM_, kN = 128;
  static constexpr bool kVectorB = kVectorB_;
  using Out = Out_;
  static_assert(kM == 256 || (kM == 192 && kVectorB));

  // kGroups warpgroups multiply, each kWaves times 64 rows; one more loads.
  static constexpr int kGroups = kM == 192 ? 3 : 2, kWaves = kM / 64 / kGroups;
  static constexpr int kStages = kM == 192 ? 5 : 4;
  static constexpr bool kOrdered = kVectorB && kGroups == 2;  // the two issue their products in turn
  static constexpr int kRaster = kM == 192 ? 10 : 8;  // tiles along M that are worked on together, for the L2 cache
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
  static_assert(kSharedBytes <= 227 * 1024);
};

struct BlockGemmParams {
  int m, n, k_blocks;
  float alpha, beta;
  const float* scale_b;       // [ceil(n / 128), k_blocks], read here unless kVectorB
  const __nv_bfloat16* bias;  // [n] or null
  const void* c;              // [m, n] of the type of out, or null
  void* out;
};

// Which tiles a block works on: bands of kRaster tiles along M, within a band M fastest.
struct BlockGemmTiles {
  int tiles_m, tiles_n, raster;

  template <class Config>
  __host__ __device__ static BlockGemmTiles Of(int m, int n) {
    return {(m - 1) / Config::kM + 1, (n - 1) / Config::kN + 1, Config::kRaster};
  }
  __host__ __device__ int Count() const { return tiles_m * tiles_n; }  // memory for the result is full long before 2^31
  __device__ int2 At(int index) const {
    const int band = index / (raster * tiles_n);
    const int height = min(raster, tiles_m - band * raster);
    const int rest = index - band * raster * tiles_n;
    return {band * raster + rest % height, rest / height};
  }
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_CONFIG_CUH_
