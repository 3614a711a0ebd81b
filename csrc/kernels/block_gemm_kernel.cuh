// The block-scaled FP8 matrix product for Hopper, as a template over tile shapes. docs/design/0003 says why it is so.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_

#include <type_traits>

#include "csrc/kernels/block_gemm_config.cuh"
#include "csrc/kernels/block_gemm_epilogue.cuh"
#include "csrc/kernels/hopper.cuh"

namespace te_jax::kernels {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    BlockGemmKernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                    const __grid_constant__ CUtensorMap map_scale_a, const __grid_constant__ CUtensorMap map_scale_b,
                    const BlockGemmParams p) {
  using namespace hopper;
  constexpr int kM = Config::kM, kN = Config::kN, kStages = Config::kStages, kCluster = Config::kCluster;
  constexpr bool kShareA = Config::kShareA;

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
  const int rank = kCluster == 1 ? 0 : RankInCluster();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(full + 8 * i, 1);
      InitBarrier(empty + 8 * i, kCluster * Config::kGroups * 4);  // one arrival a warp
    }
    FenceBarrierInit();
  }
  if constexpr (kCluster > 1) ClusterSync();
  else __syncthreads();

  const BlockGemmTiles tiles = BlockGemmTiles::Of<Config>(p);
  const int first_tile = blockIdx.x / kCluster, tile_step = gridDim.x / kCluster;
  RingPlace<kStages> place;
  // Rows and columns at which this block's part of the tile starts.
  const auto origin = [&](int tile) {
    const int2 at = tiles.At(tile);
    return kShareA ? make_int2(at.x * kM, (at.y * kCluster + rank) * kN)
                   : make_int2((at.x * kCluster + rank) * kM, at.y * kN);
  };

  if (group == Config::kGroups) {
    ShrinkRegisters<Config::kLoadRegisters>();
    if (warp == Config::kGroups * 4 && lane == 0) {
      PrefetchMap(&map_a);
      PrefetchMap(&map_b);
      for (int tile = first_tile; tile < tiles.Count(); tile += tile_step) {
        const int2 at = origin(tile);
        for (int k = 0; k < p.k_blocks; ++k, place.Next()) {
          Wait(empty + 8 * place.stage, place.parity ^ 1);
          const uint32_t barrier = full + 8 * place.stage;
          ArriveExpect(barrier, Config::kStageBytes);
          // A shared operand comes in kCluster parts, each loaded by one block for all.
          const uint32_t a = tiles_a + place.stage * Config::kBytesA, b = tiles_b + place.stage * Config::kBytesB;
          if constexpr (kCluster == 1 || !kShareA) {
            LoadBox(&map_a, a, barrier, k * kBlockK, at.x);
          } else {
            LoadBoxTo((1 << kCluster) - 1, &map_a, a + rank * Config::kBoxRowsA * kBlockK, barrier, k * kBlockK,
                      at.x + rank * Config::kBoxRowsA);
          }
          if constexpr (kCluster == 1 || kShareA) {
            LoadBox(&map_b, b, barrier, k * kBlockK, at.y);
          } else {
            LoadBoxTo((1 << kCluster) - 1, &map_b, b + rank * Config::kBoxRowsB * kBlockK, barrier, k * kBlockK,
                      at.y + rank * Config::kBoxRowsB);
          }
          LoadBox(&map_scale_a, scales_a + place.stage * Config::kBytesScaleA, barrier, at.x, k);
          if constexpr (Config::kVectorB)
            LoadBox(&map_scale_b, scales_b + place.stage * Config::kBytesScaleB, barrier, at.y, k);
        }
      }
    }
  } else {
    GrowRegisters<Config::kMathRegisters>();
    using Factors = BlockFactors<Config>;
    const int group_row = group * Config::kWaves * 64;
    const int thread_row = group_row + (warp % 4) * 16 + lane / 4;
    // Descriptors are addresses in units of 16 bytes in their lowest bits, with room for all of shared memory.
    const uint64_t group_tile_a = SwizzledTile(tiles_a + group_row * kBlockK), tile_b = SwizzledTile(tiles_b);
    const auto release = [&](int stage) {
      __syncwarp();
      if (kCluster == 1) {
        if (lane == 0) Arrive(empty + 8 * stage);
      } else if (lane < kCluster) {
        ArriveAt(empty + 8 * stage, lane);
      }
    };
    if (Config::kOrdered && group == 1) asm volatile("barrier.cta.arrive 1, 256;" ::: "memory");
    for (int tile = first_tile; tile < tiles.Count(); tile += tile_step) {
      const int2 at = origin(tile);
      float sums[Config::kWaves][kN / 2];
#pragma unroll
      for (int w = 0; w < Config::kWaves; ++w)
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) sums[w][i] = 0;

      // A cluster's last block may be all beyond n.
      const float* column_scales = p.scale_b + min(at.y, p.n - 1) / kN * int64_t{p.ld_scale_b};
      float next_columns = Config::kVectorB ? 0 : __ldg(column_scales);  // read a K block ahead

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
          next_columns = __ldg(column_scales + min(k + 1, p.k_blocks - 1));
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
          Wgmma<kN>::Issue(partial, a + (k >> 4), b + (k >> 4), k != 0);
        WgmmaCommit();
        if constexpr (Config::kOrdered) asm volatile("barrier.cta.arrive %0, 256;" ::"r"(2 - group) : "memory");
      };
      const auto columns_of = [&](int stage) {
        return Config::kVectorB ? floats(scales_b + stage * Config::kBytesScaleB) + 2 * (lane % 4) : nullptr;
      };

      if constexpr (Config::kPartials == 1) {
        float partial[kN / 2];
        for (int k = 0; k < p.k_blocks; ++k, place.Next()) {
          Factors factors;
          begin(factors, k);
#pragma unroll
          for (int w = 0; w < Config::kWaves; ++w) {
            issue(partial, w);
            ColumnsAhead<Config> ahead;
            ahead.Read(columns_of(place.stage));
            WgmmaWait<0>();
            Pin(partial);
            if (!Config::kVectorB && w == Config::kWaves - 1) release(place.stage);
            Promote<Config>(sums[w], partial, factors, w, columns_of(place.stage), ahead);
          }
          if (Config::kVectorB) release(place.stage);
        }
      } else {
        float partial[2][kN / 2];
        Factors factors[2];
        int stages[2] = {};
        // finish(i): partial[i] is done but for what was started after it.
        const auto finish = [&](auto pending, int i) {
          ColumnsAhead<Config> ahead;
          ahead.Read(columns_of(stages[i]));
          WgmmaWait<decltype(pending)::value>();
          Pin(partial[i]);
          if (!Config::kVectorB) release(stages[i]);
          Promote<Config>(sums[0], partial[i], factors[i], 0, columns_of(stages[i]), ahead);
          if (Config::kVectorB) release(stages[i]);
        };
        const auto start = [&](int i, int k) {
          begin(factors[i], k);
          issue(partial[i], 0);
          stages[i] = place.stage;
          place.Next();
        };
        start(0, 0);
        int k = 1;
        for (; k + 1 < p.k_blocks; k += 2) {
          start(1, k);
          finish(std::integral_constant<int, 1>{}, 0);
          start(0, k + 1);
          finish(std::integral_constant<int, 1>{}, 1);
        }
        if (k < p.k_blocks) {
          start(1, k);
          finish(std::integral_constant<int, 1>{}, 0);
          finish(std::integral_constant<int, 0>{}, 1);
        } else {
          finish(std::integral_constant<int, 0>{}, 0);
        }
      }
#pragma unroll
      for (int w = 0; w < Config::kWaves; ++w)
        WriteWave<Config>(sums[w], p, at.x + thread_row + 64 * w, at.y, lane);
    }
  }
  // No block may end while others of its cluster still write to its shared memory or arrive at its barriers.
  if constexpr (kCluster > 1) {
    __syncwarp();
    ClusterSync();
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_
