// The block-scaled FP8 matrix product for Hopper, as a template over tile shapes. docs/design/0003 says why it is so.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_

#include <cuda_bf16.h>

#include <type_traits>

#include "csrc/kernels/hopper.cuh"

namespace te_jax::kernels {

constexpr int kBlockK = 128;  // the extent of a scale along K, and a row of a tile: 128 bytes

// kGroups warpgroups multiply, each kWaves times 64 rows; a tile is kGroups * kWaves * 64 rows by kN columns.
// kCluster blocks share A (neighbours along N) or B (neighbours along M).
// kVectorB: b has a scale per row and K block (1 x 128); else per 128 rows and K block.
// kPartials: accumulators of one K block per warpgroup; 2 keep the tensor cores busy while one of them is promoted.
// kOrdered: two warpgroups issue their products in turn.
// kDeferred: a wave is written while the next one is multiplied.
template <int kGroups_, int kWaves_, int kN_, int kStages_, int kCluster_, bool kShareA_, bool kVectorB_,
          int kPartials_ = 1, bool kOrdered_ = false, bool kDeferred_ = true, class Out_ = __nv_bfloat16>
struct BlockGemmConfig {
  static constexpr int kGroups = kGroups_, kWaves = kWaves_, kN = kN_, kStages = kStages_, kCluster = kCluster_;
  static constexpr bool kShareA = kShareA_, kVectorB = kVectorB_, kOrdered = kOrdered_;
  static constexpr bool kDeferred = kDeferred_ && kPartials_ == 1;
  static constexpr int kPartials = kPartials_;
  using Out = Out_;

  static constexpr int kM = kGroups * kWaves * 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  // Registers of a thread: what is compiled for at entry, 65536 / kThreads, is dealt out anew between the roles.
  static constexpr int kMathRegisters = kGroups == 3 ? 160 : kN > 128 ? 240 : 232;
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : kN > 128 ? 24 : 40;

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
  static_assert(kN % 32 == 0 && kN <= 192 && kM <= 256);
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

// Factors of one thread's accumulators: rows lane / 4 and + 8 of each wave, for up to two blocks of 128 columns.
template <class Config>
struct BlockFactors {
  static constexpr int kColumnBlocks = Config::kN % 128 == 0 ? 1 : 2;
  float rows[Config::kWaves][2];
  float columns[kColumnBlocks];
};

// sums += partial * factors. `columns` are the columns' factors of a 1 x 128 scaled b, `first_block` the groups of 8
// columns that belong to the first block of 128.
template <class Config>
__device__ inline void Promote(float (&sums)[Config::kN / 2], const float (&partial)[Config::kN / 2],
                               const BlockFactors<Config>& factors, int wave, const float* columns, int first_block) {
  if constexpr (Config::kVectorB) {
    const float low = factors.rows[wave][0], high = factors.rows[wave][1];
#pragma unroll
    for (int j = 0; j < Config::kN / 8; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(columns + 8 * j);
      sums[4 * j] += partial[4 * j] * low * b.x;
      sums[4 * j + 1] += partial[4 * j + 1] * low * b.y;
      sums[4 * j + 2] += partial[4 * j + 2] * high * b.x;
      sums[4 * j + 3] += partial[4 * j + 3] * high * b.y;
    }
  } else {
    constexpr int kBlocks = BlockFactors<Config>::kColumnBlocks;
    float low[kBlocks], high[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      low[i] = factors.rows[wave][0] * factors.columns[i];
      high[i] = factors.rows[wave][1] * factors.columns[i];
    }
#pragma unroll
    for (int j = 0; j < Config::kN / 8; ++j) {
      const bool last = kBlocks > 1 && j >= first_block;
      const float a = last ? low[kBlocks - 1] : low[0], b = last ? high[kBlocks - 1] : high[0];
      sums[4 * j] += partial[4 * j] * a;
      sums[4 * j + 1] += partial[4 * j + 1] * a;
      sums[4 * j + 2] += partial[4 * j + 2] * b;
      sums[4 * j + 3] += partial[4 * j + 3] * b;
    }
  }
}

// Writes one wave: a thread has columns 2 * (lane % 4) and + 1 of each group of 8, in rows `row` and `row` + 8. Four
// neighbouring lanes exchange pairs so that each writes 16 bytes, and no shared memory is needed.
template <class Config>
__device__ inline void WriteWave(const float (&sums)[Config::kN / 2], const BlockGemmParams& p, int row, int column,
                                 int lane) {
  const int quad = lane % 4;
  if constexpr (std::is_same_v<typename Config::Out, float>) {
    float* out = static_cast<float*>(p.out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
#pragma unroll
      for (int j = 0; j < Config::kN / 8; ++j) {
        const int c = column + 8 * j + 2 * quad;
        if (r < p.m && c < p.n)
          *reinterpret_cast<float2*>(out + r * p.ld_out + c) =
              make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      }
    }
  } else {
    auto* out = static_cast<__nv_bfloat16*>(p.out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
#pragma unroll
      for (int j = 0; j < Config::kN / 8; j += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat162 pair =
              __floats2bfloat162_rn(sums[4 * (j + i) + 2 * half], sums[4 * (j + i) + 2 * half + 1]);
          v[i] = reinterpret_cast<const uint32_t&>(pair);
        }
        // The transpose of the 4 x 4 matrix [lane of the quad, group].
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const bool upper = quad & step;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i + step], step);
            if (upper) v[i] = received;
            else v[i + step] = received;
          }
        }
        const int c = column + 8 * (j + quad);
        if (r < p.m && c < p.n)
          *reinterpret_cast<uint4*>(out + r * p.ld_out + c) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

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

    float sums[Config::kWaves][kN / 2];
    const auto zero = [&](int wave) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) sums[wave][i] = 0;
    };
    const auto write = [&](int wave, int2 at) {
      WriteWave<Config>(sums[wave], p, at.x + thread_row + 64 * wave, at.y, lane);
    };
    constexpr int kLastWave = Config::kWaves - 1;
    int2 before = {-1, 0};  // the tile before, whose last wave isn't written yet

    for (int tile = first_tile; tile < tiles.Count(); tile += tile_step) {
      const int2 at = origin(tile);
      if constexpr (!Config::kDeferred) {
#pragma unroll
        for (int w = 0; w < Config::kWaves; ++w) zero(w);
      }

      const float* column_scales[Factors::kColumnBlocks];
#pragma unroll
      for (int i = 0; i < Factors::kColumnBlocks; ++i)
        column_scales[i] = p.scale_b + min(at.y / 128 + i, (p.n - 1) / 128) * int64_t{p.ld_scale_b};
      const int first_block = (128 - at.y % 128) / 8;
      float next_columns[Factors::kColumnBlocks] = {};  // read a K block ahead
      if constexpr (!Config::kVectorB) {
#pragma unroll
        for (int i = 0; i < Factors::kColumnBlocks; ++i) next_columns[i] = __ldg(column_scales[i]);
      }

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
#pragma unroll
          for (int i = 0; i < Factors::kColumnBlocks; ++i) {
            factors.columns[i] = next_columns[i];
            next_columns[i] = __ldg(column_scales[i] + min(k + 1, p.k_blocks - 1));
          }
        }
      };
      // Starts partial = 64 rows of A by B of the stage at `place`.
      const auto issue = [&](float(&partial)[kN / 2], int wave) {
        const uint64_t a = group_tile_a + ((place.stage * Config::kBytesA + 64 * wave * kBlockK) >> 4);
        const uint64_t b = tile_b + ((place.stage * Config::kBytesB) >> 4);
        if constexpr (Config::kOrdered)
          asm volatile("barrier.cta.sync %0, 256;" ::"r"(1 + group) : "memory");
        Pin(partial);
        WgmmaFence();
#pragma unroll
        for (int k = 0; k < kBlockK; k += 32)
          Wgmma<kN>::Issue(partial, a + (k >> 4), b + (k >> 4), k != 0);
        WgmmaCommit();
        if constexpr (Config::kOrdered)
          asm volatile("barrier.cta.arrive %0, 256;" ::"r"(2 - group) : "memory");
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
            if constexpr (Config::kDeferred) {
              if (w > 0 && k == p.k_blocks - 1) write(w - 1, at);
              if (k == 0) {
                if (w == 0 && before.x >= 0) write(kLastWave, before);
                zero(w);
              }
            }
            WgmmaWait<0>();
            Pin(partial);
            if (!Config::kVectorB && w == Config::kWaves - 1) release(place.stage);
            Promote<Config>(sums[w], partial, factors, w, columns_of(place.stage), first_block);
          }
          if (Config::kVectorB) release(place.stage);
        }
      } else {
        float partial[2][kN / 2];
        Factors factors[2];
        int stages[2] = {};
        // finish(i): partial[i] is done but for what was started after it.
        const auto finish = [&](auto pending, int i) {
          WgmmaWait<decltype(pending)::value>();
          Pin(partial[i]);
          if (!Config::kVectorB) release(stages[i]);
          Promote<Config>(sums[0], partial[i], factors[i], 0, columns_of(stages[i]), first_block);
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
      if constexpr (Config::kDeferred) {
        before = at;
      } else {
#pragma unroll
        for (int w = 0; w < Config::kWaves; ++w) write(w, at);
      }
    }
    if (Config::kDeferred && before.x >= 0) write(kLastWave, before);
  }
  // No block may end while others of its cluster still write to its shared memory or arrive at its barriers.
  if constexpr (kCluster > 1) {
    __syncwarp();
    ClusterSync();
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_KERNEL_CUH_
