// The block-scaled FP8 matrix product for Hopper, as a template over tile shapes. docs/design/0003 says why it is so.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_

#include "csrc/kernels/block_gemm_config.cuh"
#include "csrc/kernels/block_gemm_epilogue.cuh"
#include "csrc/kernels/hopper.cuh"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/wgmma.cuh"

namespace te_jax::kernels {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    BlockGemmKernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                    const __grid_constant__ CUtensorMap map_scale_a, const __grid_constant__ CUtensorMap map_scale_b,
                    const BlockGemmParams p) {
  using namespace hopper;
  constexpr int kM = Config::kM, kN = Config::kN, kStages = Config::kStages;

  extern __shared__ uint8_t shared[];
  const uint32_t tiles_a = (SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t tiles_b = tiles_a + kStages * Config::kBytesA;
  const uint32_t scales_a = tiles_b + kStages * Config::kBytesB;
  const uint32_t scales_b = scales_a + kStages * Config::kBytesScaleA;
  const uint32_t full = scales_b + kStages * Config::kBytesScaleB;
  const uint32_t empty = full + kStages * 8;
  const auto floats = [&](uint32_t address) {
    return reinterpret_cast<const float*>(shared + (address - SharedAddress(shared)));
  };

  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int group = warp / 4;  // the last one loads
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    PrefetchMap(&map_a);
    PrefetchMap(&map_b);
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(full + 8 * i, 1);
      InitBarrier(empty + 8 * i, Config::kGroups * 4);  // one arrival a warp
    }
    FenceBarrierInit();
  }
  __syncthreads();
  AwaitPredecessor();

  const auto tiles = BlockGemmTiles::Of<Config>(p.m, p.n);
  RingPlace<kStages> place;

  if (group == Config::kGroups) {
    ShrinkRegisters<Config::kLoadRegisters>();
    if (warp == Config::kGroups * 4 && lane == 0) {
      for (int tile = blockIdx.x; tile < tiles.Count(); tile += gridDim.x) {
        const int2 at = tiles.At(tile);
        const int row = at.x * kM, column = at.y * kN;
        for (int k = 0; k < p.k_blocks; ++k, place.Next()) {
          Wait(empty + 8 * place.stage, place.parity ^ 1);
          const uint32_t barrier = full + 8 * place.stage;
          ArriveExpect(barrier, Config::kStageBytes);
          LoadBox(&map_a, tiles_a + place.stage * Config::kBytesA, barrier, k * kBlockK, row);
          LoadBox(&map_b, tiles_b + place.stage * Config::kBytesB, barrier, k * kBlockK, column);
          LoadBox(&map_scale_a, scales_a + place.stage * Config::kBytesScaleA, barrier, row, k);
          if constexpr (Config::kVectorB)
            LoadBox(&map_scale_b, scales_b + place.stage * Config::kBytesScaleB, barrier, column, k);
        }
      }
    }
    return;
  }

  GrowRegisters<Config::kMathRegisters>();
  using Factors = BlockFactors<Config>;
  const int group_row = group * Config::kWaves * 64;
  const int thread_row = group_row + (warp % 4) * 16 + lane / 4;
  // Descriptors are addresses in units of 16 bytes in their lowest bits, with room for all of shared memory.
  const uint64_t group_tile_a = SwizzledTile(tiles_a + group_row * kBlockK), tile_b = SwizzledTile(tiles_b);
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) Arrive(empty + 8 * stage);
  };
  if (Config::kOrdered && group == 1) asm volatile("barrier.cta.arrive 1, 256;" ::: "memory");
  for (int tile = blockIdx.x; tile < tiles.Count(); tile += gridDim.x) {
    const int2 at = tiles.At(tile);
    const int row = at.x * kM + thread_row, column = at.y * kN;
    float sums[Config::kWaves][kN / 2];
#pragma unroll
    for (int w = 0; w < Config::kWaves; ++w)
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) sums[w][i] = 0;

    // Not by __ldg: no load may move before AwaitPredecessor.
    const float* column_scales = p.scale_b + at.y * int64_t{p.k_blocks};
    float next_columns = Config::kVectorB ? 0 : column_scales[0];  // read a K block ahead

    // Waits for the stage at `place` and reads the scales of K block k.
    const auto begin = [&](Factors& factors, int k) {
      Wait(full + 8 * place.stage, place.parity);
      const float* rows = floats(scales_a + place.stage * Config::kBytesScaleA) + thread_row;
#pragma unroll
      for (int w = 0; w < Config::kWaves; ++w) {
        factors.rows[w][0] = rows[64 * w];
        factors.rows[w][1] = rows[64 * w + 8];
      }
      if constexpr (!Config::kVectorB) {
        factors.columns = next_columns;
        next_columns = column_scales[min(k + 1, p.k_blocks - 1)];
      }
    };
    // Starts partial = 64 rows of A by B of the stage at `place`.
    const auto issue = [&](float(&partial)[kN / 2], int wave) {
      const uint64_t a = group_tile_a + ((place.stage * Config::kBytesA + 64 * wave * kBlockK) >> 4);
      const uint64_t b = tile_b + ((place.stage * Config::kBytesB) >> 4);
      if constexpr (Config::kOrdered) asm volatile("barrier.cta.sync %0, 256;" ::"r"(1 + group) : "memory");
      Pin(partial);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kBlockK; k += 32)
        Wgmma<DType::kE4M3, DType::kE4M3, kN>(partial, a + (k >> 4), b + (k >> 4), k != 0);
      WgmmaCommit();
      if constexpr (Config::kOrdered) asm volatile("barrier.cta.arrive %0, 256;" ::"r"(2 - group) : "memory");
    };

    float partial[kN / 2];
    for (int k = 0; k < p.k_blocks; ++k, place.Next()) {
      Factors factors;
      begin(factors, k);
      const float* columns =
          Config::kVectorB ? floats(scales_b + place.stage * Config::kBytesScaleB) + 2 * (lane % 4) : nullptr;
#pragma unroll
      for (int w = 0; w < Config::kWaves; ++w) {
        issue(partial, w);
        WgmmaWait<0>();
        Pin(partial);
        if (!Config::kVectorB && w == Config::kWaves - 1) release(place.stage);
        Promote<Config>(sums[w], partial, factors, w, columns);
      }
      if (Config::kVectorB) release(place.stage);
    }
#pragma unroll
    for (int w = 0; w < Config::kWaves; ++w) {
      Finish<Config>(sums[w], p, row + 64 * w, column, lane);
      WriteFragment(sums[w], static_cast<typename Config::Out*>(p.out), {row + 64 * w, p.m, column, p.n, p.n}, lane);
    }
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_
