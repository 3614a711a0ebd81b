// The grouped product for Hopper, as a template over operand types and what is ragged. docs/design/0004 says why it
// is so.
#ifndef TE_JAX_KERNELS_GROUPED_GEMM_KERNEL_CUH_
#define TE_JAX_KERNELS_GROUPED_GEMM_KERNEL_CUH_

#include "csrc/kernels/grouped_gemm_config.cuh"
#include "csrc/kernels/grouped_gemm_epilogue.cuh"
#include "csrc/kernels/hopper.cuh"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/ring.cuh"
#include "csrc/kernels/wgmma.cuh"

namespace te_jax::kernels {

// The shared memory of a stage: a, then b, both in rows of 128 bytes.
constexpr int kZeroBytes = 1024;

// Not a branch, which would part products that are issued together.
__device__ inline uint64_t Select(bool first, uint64_t a, uint64_t b) {
  uint64_t result;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nselp.b64 %0, %1, %2, p;\n}\n"
      : "=l"(result)
      : "l"(a), "l"(b), "r"(static_cast<int>(first)));
  return result;
}

template <class Config>
struct GroupedStages {
  uint8_t* memory;       // [kStages, kStageBytes], 1024-byte aligned
  uint32_t full, empty;  // [kStages] mbarriers each
  uint32_t zeros;        // kZeroBytes of zeros: a tile of any height, whose rows are all the same

  __device__ uint8_t* Stage(int stage) const { return memory + stage * Config::kStageBytes; }
  __device__ uint32_t Full(int stage) const { return full + 8 * stage; }
  __device__ uint32_t Empty(int stage) const { return empty + 8 * stage; }
};

// A box to this block, or to both of the cluster.
template <class... Places>
__device__ inline void LoadBoxOf(bool both, const CUtensorMap* map, uint32_t target, uint32_t barrier,
                                 Places... places) {
  if (both) hopper::LoadBoxTo(0b11, map, target, barrier, places...);
  else hopper::LoadBox(map, target, barrier, places...);
}
// One of the kCluster parts of a stage's a, which is kPartM rows, or b.
template <class Config>
__device__ inline void LoadA(bool both, int part, const CUtensorMap* map, uint32_t stage, uint32_t barrier,
                             const GroupedTile& tile, int k) {
  const uint32_t target = stage + part * (Config::kBytesA / Config::kCluster);
  const int row = tile.row + part * Config::kPartM;
  if constexpr (Config::kColumnsA) {
#pragma unroll
    for (int i = 0; i < Config::kPartM / 64; ++i)
      LoadBoxOf(both, map, target + i * Config::kBoxBytes, barrier, row + 64 * i, k);
  } else {
    LoadBoxOf(both, map, target, barrier, k, row);
  }
}
template <class Config>
__device__ inline void LoadB(bool both, int part, const CUtensorMap* map, uint32_t stage, uint32_t barrier,
                             const GroupedTile& tile, int k) {
  constexpr bool kRows = Config::kRagged == Ragged::kRows;
  const uint32_t target = stage + Config::kBytesA + part * (Config::kBytesB / Config::kCluster);
  const int column = tile.column + part * Config::kPartN;
  if constexpr (Config::kColumnsB) {
#pragma unroll
    for (int i = 0; i < Config::kPartN / 64; ++i) {
      const uint32_t box = target + i * Config::kBoxBytes;
      if constexpr (kRows) LoadBoxOf(both, map, box, barrier, column + 64 * i, k, tile.group);
      else LoadBoxOf(both, map, box, barrier, column + 64 * i, k);
    }
  } else {
    if constexpr (kRows) LoadBoxOf(both, map, target, barrier, k, column, tile.group);
    else LoadBoxOf(both, map, target, barrier, k, column);
  }
}

// c of the tile [kM, kN], in stages of their own.
template <class Config>
__device__ inline void LoadC(const GroupedParams& p, const CUtensorMap* map, const GroupedTile& tile,
                             const GroupedStages<Config>& stages, RingPlace<Config::kStages>& place) {
  using namespace hopper;
  const int columns = p.out_f32 ? Config::template kColumnsC<float> : Config::template kColumnsC<__nv_bfloat16>;
  const int boxes = Config::kN / columns;
  for (int done = 0; done < boxes; done += Config::kBoxesC, place.Next()) {
    const int count = min(Config::kBoxesC, boxes - done);
    Wait(stages.Empty(place.stage), place.parity ^ 1);
    const uint32_t barrier = stages.Full(place.stage), stage = SharedAddress(stages.Stage(place.stage));
    ArriveExpect(barrier, count * Config::kBoxBytesC);
    for (int i = 0; i < count; ++i) {
      LoadBox(map, stage + i * Config::kBoxBytesC, barrier, tile.column + (done + i) * columns, tile.row, tile.group);
    }
  }
}

// Copies the stages of one tile after the other. By one warp, of which one lane copies. The blocks of a cluster go
// through the same stages: each loads half of what they share to both, when both have room for it.
template <class Config>
__device__ inline void LoadTiles(const GroupedParams& p, const CUtensorMap* map_a, const CUtensorMap* map_b,
                                 const CUtensorMap* map_c, GroupedTiles<Config> tiles,
                                 const GroupedStages<Config>& stages) {
  using namespace hopper;
  const int rank = blockIdx.x % Config::kCluster;
  RingPlace<Config::kStages> place;
  for (GroupedTile tile; tiles.Next(tile);) {
    if (threadIdx.x % kWarp != 0) continue;  // if only that lane came here, ptxas would spill
    // The lower half of a's rows, if all are of the next group, is neither loaded nor multiplied.
    const bool lower = Config::kCluster == 1 || tile.row + Config::kPartM < tile.row_end;
    const uint32_t bytes = Config::kStageBytes - (lower ? 0 : Config::kBytesA / 2);
    for (int done = 0; done < tile.k_size; done += Config::kK, place.Next()) {
      const int k = tile.k_start + done;
      Wait(stages.Empty(place.stage), place.parity ^ 1);
      const uint32_t barrier = stages.Full(place.stage), stage = SharedAddress(stages.Stage(place.stage));
      const auto load_a = [&](bool both, int part) { LoadA<Config>(both, part, map_a, stage, barrier, tile, k); };
      const auto load_b = [&](bool both, int part) { LoadB<Config>(both, part, map_b, stage, barrier, tile, k); };
      ArriveExpect(barrier, bytes);
      if constexpr (Config::kCluster == 1) {
        load_a(false, 0);
        load_b(false, 0);
      } else if (tile.share_b) {
        load_a(false, 0);
        if (lower) load_a(false, 1);
        load_b(true, rank);
      } else {
        if (rank == 0 || lower) load_a(true, rank);
        load_b(false, 0);
        load_b(false, 1);
      }
    }
    if constexpr (Config::kRagged == Ragged::kContraction) {
      if (p.c != nullptr) LoadC<Config>(p, map_c, tile, stages, place);
    }
  }
}

// After a change to a stage, before it is multiplied. By all threads that multiply, which meet here.
template <class Config>
__device__ inline void PublishStage() {
  // wgmma reads shared memory as the copy engine writes it.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("barrier.cta.sync 1, %0;" ::"n"(Config::kMathThreads) : "memory");
}

// Zeroes what follows the first `size` indices of the contraction in a stage, up to the end of the last wgmma's: it
// is of other groups, or of none, and needn't be finite.
template <class Config>
__device__ inline void ClearBehind(uint8_t* stage, int size) {
  if (size % Config::kStepK == 0) return;
  const int thread = threadIdx.x;
  if constexpr (Config::kColumnsA) {  // rows of the boxes
    static_assert(Config::kColumnsB);
    const int rows = (size + 15) / 16 * 16 - size, words = rows * 8;
    for (int i = thread; i < words * (Config::kStageBytes / Config::kBoxBytes); i += Config::kMathThreads) {
      uint8_t* box = stage + i / words * Config::kBoxBytes;
      reinterpret_cast<uint4*>(box + size * 128)[i % words] = make_uint4(0, 0, 0, 0);
    }
  } else {  // bytes of the rows, whose 16-byte units are swizzled
    const int unit = size / 16, kept = size % 16;
    for (int row = thread; row < Config::kStageBytes / 128; row += Config::kMathThreads) {
      uint4* units = reinterpret_cast<uint4*>(stage + row * 128);
      uint4 value = units[unit ^ (row % 8)];
      uint32_t* words = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int bytes = kept - 4 * i;
        if (bytes < 4) words[i] &= bytes <= 0 ? 0 : (1u << (8 * bytes)) - 1;
      }
      units[unit ^ (row % 8)] = value;
      if (unit % 2 == 0) units[(unit + 1) ^ (row % 8)] = make_uint4(0, 0, 0, 0);
    }
  }
  PublishStage<Config>();
}

// The same of the first `size` indices, fewer than kContractionAlign.
template <class Config>
__device__ inline void ClearHead(uint8_t* stage, int size) {
  static_assert(!Config::kColumnsA && Config::kContractionAlign == 32);
  for (int row = threadIdx.x; row < Config::kStageBytes / 128; row += Config::kMathThreads) {
    uint4* units = reinterpret_cast<uint4*>(stage + row * 128);
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
      uint4 value = units[unit ^ (row % 8)];
      uint32_t* words = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int bytes = size - 16 * unit - 4 * i;
        if (bytes > 0) words[i] &= bytes >= 4 ? 0 : ~((1u << (8 * bytes)) - 1);
      }
      units[unit ^ (row % 8)] = value;
    }
  }
  PublishStage<Config>();
}

// The products of one warpgroup.
template <class Config>
class GroupedMath {
 public:
  static constexpr int kCount = Config::kN / 2;  // accumulators of a thread

  __device__ GroupedMath(const GroupedStages<Config>& stages, int group) : stages_(stages), group_(group) {}

  // sums = a * b^T of the tile, 64 rows of it.
  __device__ void Multiply(const GroupedTile& tile, float (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = 0;
    if constexpr (kRows) {  // stages are whole: k is zero behind its end in both operands
      const int blocks = (tile.k_size + Config::kK - 1) / Config::kK;
      if (tile.row + 64 * group_ >= tile.row_end) Skip(blocks);
      else if constexpr (Config::kFast) AddFast(sums, blocks);
      else AddPrecise(sums, blocks, 0);
    } else {
      const int blocks = tile.k_size / Config::kK, rest = tile.k_size % Config::kK;
      if constexpr (Config::kContractionAlign > 1) {
        if (tile.k_head != 0) {
          hopper::Wait(stages_.Full(place_.stage), place_.parity);
          ClearHead<Config>(stages_.Stage(place_.stage), tile.k_head);
        }
      }
      if constexpr (Config::kFast) {
        AddFast(sums, blocks);
        if (rest != 0) AddFastRest(sums, rest);
      } else {
        AddPrecise(sums, blocks, rest);
      }
    }
  }

  // sums += c of the tile, of elements Out.
  template <class Out>
  __device__ void AddC(float (&sums)[kCount]) {
    constexpr int kColumns = Config::template kColumnsC<Out>, kBoxes = Config::kN / kColumns;
    hopper::Pin(sums);  // else ptxas spills
    const int lane = threadIdx.x % kWarp;  // what of the tile is this thread's: fragment.cuh
    const int row = group_ * 64 + threadIdx.x / kWarp % 4 * 16 + lane / 4;
#pragma unroll
    for (int done = 0; done < kBoxes; done += Config::kBoxesC, place_.Next()) {
      hopper::Wait(stages_.Full(place_.stage), place_.parity);
      const uint8_t* rows = stages_.Stage(place_.stage) + row * 128;
#pragma unroll
      for (int box = done; box < done + Config::kBoxesC && box < kBoxes; ++box) {
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) {
          const int half = i % 2, column = i / 2 * 8 + lane % 4 * 2, byte = column * sizeof(Out);
          const int unit = (byte / 16) ^ (lane / 4);  // swizzled
          const uint8_t* at = rows + (box - done) * Config::kBoxBytesC + half * (8 * 128) + unit * 16 + byte % 16;
          const float2 add = Pair(reinterpret_cast<const Out*>(at));
          const int j = box * (kColumns / 8) + i / 2;
          sums[4 * j + 2 * half] += add.x;
          sums[4 * j + 2 * half + 1] += add.y;
        }
      }
      Release(place_.stage);
    }
  }

 private:
  static constexpr bool kRows = Config::kRagged == Ragged::kRows;

  __device__ void AddFast(float (&sums)[kCount], int blocks) {
    using namespace hopper;
    int previous = -1;
    for (int i = 0; i < blocks; ++i, place_.Next()) {
      Wait(stages_.Full(place_.stage), place_.parity);
      Start<4>(sums);
      WgmmaWait<1>();
      if (previous >= 0) Release(previous);
      previous = place_.stage;
    }
    WgmmaWait<0>();
    Pin(sums);
    if (previous >= 0) Release(previous);
  }
  // A stage of which only the first `size` indices are of this group.
  __device__ void AddFastRest(float (&sums)[kCount], int size) {
    using namespace hopper;
    Wait(stages_.Full(place_.stage), place_.parity);
    ClearBehind<Config>(stages_.Stage(place_.stage), size);
    switch ((size - 1) / Config::kStepK) {  // no loop: ptxas moves accumulators around for one
      case 0: Start<1>(sums); break;
      case 1: Start<2>(sums); break;
      case 2: Start<3>(sums); break;
      default: Start<4>(sums);
    }
    WgmmaWait<0>();
    Pin(sums);
    Release(place_.stage);
    place_.Next();
  }
  // sums += the first kSteps steps of this stage.
  template <int kSteps>
  __device__ void Start(float (&sums)[kCount]) const {
    using namespace hopper;
    Pin(sums);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<Config::kA, Config::kB, Config::kN, Config::kColumnsA, Config::kColumnsB>(sums, TileA(step), TileB(step),
                                                                                     true);
    }
    WgmmaCommit();
  }

  // `rest` indices of one more stage are of this group.
  __device__ void AddPrecise(float (&sums)[kCount], int blocks, int rest) {
    using namespace hopper;
    const uint64_t zeros = TileDescriptor(stages_.zeros, 0, 0);
    for (int i = 0; i < blocks + (rest != 0); ++i, place_.Next()) {
      Wait(stages_.Full(place_.stage), place_.parity);
      // What is not of the group is cleared, or replaced by zeros. Fewer products would be code of their own, for which
      // registers aren't enough.
      const int size = i < blocks ? Config::kK : rest;
      if (!kRows && i == blocks) ClearBehind<Config>(stages_.Stage(place_.stage), size);
      float partial[kCount / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the columns: there are no registers for a second set of all
        Pin(partial);
        WgmmaFence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          uint64_t a = TileA(step), b = TileB(step, half);
          if (!kRows && step > 0) {
            a = Select(step * Config::kStepK < size, a, zeros);
            b = Select(step * Config::kStepK < size, b, zeros);
          }
          Wgmma<Config::kA, Config::kB, Config::kN / 2>(partial, a, b, step != 0);
        }
        WgmmaCommit();
        WgmmaWait<0>();
        Pin(partial);
        if (half == 1) Release(place_.stage);
#pragma unroll
        for (int j = 0; j < kCount / 2; ++j) sums[half * (kCount / 2) + j] += partial[j];
      }
    }
  }

  __device__ uint64_t TileA(int step) const {
    const uint32_t a = hopper::SharedAddress(stages_.Stage(place_.stage));
    if constexpr (Config::kColumnsA)
      return hopper::SwizzledTileTransposed(a + group_ * Config::kBoxBytes + step * kColumnsStep, Config::kBoxBytes);
    else return hopper::SwizzledTile(a + group_ * 64 * 128 + step * kRowsStep);
  }
  __device__ uint64_t TileB(int step, int half = 0) const {
    const uint32_t b = hopper::SharedAddress(stages_.Stage(place_.stage)) + Config::kBytesA;
    if constexpr (Config::kColumnsB)
      return hopper::SwizzledTileTransposed(b + step * kColumnsStep, Config::kBoxBytes);
    else return hopper::SwizzledTile(b + half * (Config::kBytesB / 2) + step * kRowsStep);
  }
  static constexpr int kRowsStep = 32, kColumnsStep = 16 * 128;  // bytes

  // Nothing of the tile is ours.
  __device__ void Skip(int blocks) {
    for (int i = 0; i < blocks; ++i, place_.Next()) {
      hopper::Wait(stages_.Full(place_.stage), place_.parity);
      Release(place_.stage);
    }
  }
  __device__ void Release(int stage) const {
    __syncwarp();
    const int lane = threadIdx.x % kWarp;
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) hopper::Arrive(stages_.Empty(stage));
    } else {
      if (lane < Config::kCluster) hopper::ArriveIn(lane, stages_.Empty(stage));  // whoever loads to here
    }
  }

  const GroupedStages<Config>& stages_;
  const int group_;  // this warpgroup
  RingPlace<Config::kStages> place_;
};

template <class Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    GroupedGemmKernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                      const __grid_constant__ CUtensorMap map_c, const __grid_constant__ GroupedParams p) {
  using namespace hopper;
  extern __shared__ uint8_t shared[];
  __shared__ GroupTable table;
  __shared__ alignas(8) uint64_t barriers[2 * Config::kStages];
  __shared__ alignas(128) uint8_t zeros[kZeroBytes];
  const uint32_t unaligned = SharedAddress(shared);
  const GroupedStages<Config> stages{shared + ((1024 - unaligned % 1024) % 1024), SharedAddress(barriers),
                                     SharedAddress(barriers + Config::kStages), SharedAddress(zeros)};

  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarp, 0);
  if (threadIdx.x == 0) {
    PrefetchMap(&map_a);
    PrefetchMap(&map_b);
    for (int i = 0; i < Config::kStages; ++i) {
      InitBarrier(stages.Full(i), 1);
      InitBarrier(stages.Empty(i), Config::kCluster * Config::kMathThreads / kWarp);  // one arrival a warp
    }
    FenceBarrierInit();
  }
  AwaitPredecessor();
  if (warp == 0) table.Fill<Config>(p);
  else if (warp < 3) reinterpret_cast<uint4*>(zeros)[threadIdx.x - kWarp] = make_uint4(0, 0, 0, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if constexpr (Config::kCluster == 1) __syncthreads();
  else SyncCluster();

  GroupedTiles<Config> tiles(p, table);
  const int group = warp / 4;  // the last one loads
  if (group == 2) {
    ShrinkRegisters<Config::kLoadRegisters>();
    if (warp == Config::kMathThreads / kWarp) LoadTiles<Config>(p, &map_a, &map_b, &map_c, tiles, stages);
    return;
  }
  GrowRegisters<Config::kMathRegisters>();
  GroupedMath<Config> math(stages, group);
  for (GroupedTile tile; tiles.Next(tile);) {
    float sums[Config::kN / 2];
    math.Multiply(tile, sums);
    Scale<Config>(sums, p, tile);
    if constexpr (Config::kRagged == Ragged::kContraction) {
      if (p.c != nullptr) {
        if (p.out_f32) math.template AddC<float>(sums);
        else math.template AddC<__nv_bfloat16>(sums);
      }
    }
    Finish<Config>(sums, p, tile, group * 64 + warp % 4 * 16);
  }
  // The other block loads to here, and arrives at barriers here, until it is done.
  if constexpr (Config::kCluster > 1) SyncCluster();
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_KERNEL_CUH_
