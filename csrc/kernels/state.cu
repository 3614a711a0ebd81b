// One block for each quantizer. Its first warp holds the rungs and finds what the uses of the step agree on, all of
// them look through the history; after one barrier everything is elementwise.
#include "csrc/kernels/state.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "csrc/core/fp8.h"
#include "csrc/core/state.h"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/reduce.cuh"

namespace te_jax::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Quantizers of a launch: their pointers are kernel arguments, of which there are 4 KB. A longer chain takes several.
constexpr int kMaxQuantizers = 128;
static_assert(state::kRungs == 2 * kWarp && state::kUses <= kThreads);

struct Leaves {
  int64_t history_len;
  const float *amax_history, *scale, *uses;
  float power_of_margin;  // 2^-margin
  int32_t margin;
  bool most_recent;
  uint32_t e5m2[kMaxQuantizers / 32];  // a bit for each quantizer
};

struct ReadParams {
  Leaves leaves;
  float* scales[kMaxQuantizers];
};

struct WriteParams {
  Leaves leaves;
  const float* amaxes[kMaxQuantizers];
  float *amax_history, *scale, *uses;
};
static_assert(sizeof(WriteParams) <= 4096);

// use(i, load(i)) for this thread's indices, begin + threadIdx.x and every kThreads-th below `end`. A batch's loads are
// all on their way before the first is used: what a small kernel takes is latency.
constexpr int kBatch = 4;
template <class Load, class Use>
__device__ void ForEachInBatches(int64_t begin, int64_t end, Load&& load, Use&& use) {
  for (int64_t first = begin + threadIdx.x; first < end; first += kBatch * kThreads) {
    decltype(load(first)) values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (const int64_t i = first + j * kThreads; i < end) values[j] = load(i);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (const int64_t i = first + j * kThreads; i < end) use(i, values[j]);
    }
  }
}

struct Row {
  state::Uses uses;
  float newest;
  state::View view;
};

__device__ float LeafOf(const float* leaf, int64_t i) { return state::Flush(leaf[i]); }

__device__ float MaxOf(const Leaves& leaves, int q) {
  return leaves.e5m2[q / 32] >> (q % 32) & 1 ? E5M2::kMax : E4M3::kMax;
}

__device__ float NewestOf(const float* slots, float first, state::Sums& sums, state::Uses& uses) {
  const int lane = threadIdx.x;
  const float low = LeafOf(slots, lane), high = LeafOf(slots, lane + kWarp);
  const float other = lane < state::kUses - state::kRungs ? LeafOf(slots, state::kRungs + lane) : 0.0f;
  float sum = state::Flush(low + high);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum = state::Flush(sum + __shfl_xor_sync(kFullMask, sum, offset));
  }
  sums.with_amax = sum;
  sums.populated = __popc(__ballot_sync(kFullMask, low != 0.0f)) + __popc(__ballot_sync(kFullMask, high != 0.0f));
  sums.rounded = __all_sync(kFullMask, state::IsBF16(low) && state::IsBF16(high) && state::IsBF16(other));
  const float no_amax = __shfl_sync(kFullMask, other, state::kNoAmax - state::kRungs);
  uses = state::CountUses(sum, no_amax, first);
  const int32_t rung = max(state::PossibleRung(lane, low, uses), state::PossibleRung(lane + kWarp, high, uses));
  return state::Newest(uses, sums.populated, __reduce_max_sync(kFullMask, rung));
}

// The leaves of quantizer q, decoded; for all threads of the block.
__device__ Row Decode(const Leaves& leaves, int q) {
  __shared__ state::Sums shared_sums;
  __shared__ state::Uses shared_uses;
  __shared__ float shared_newest, highest_of[kWarps], lowest_of[kWarps];
  const float* history = leaves.amax_history + q * leaves.history_len;
  const float* slots = leaves.uses + static_cast<int64_t>(q) * state::kUses;
  const float first = LeafOf(history, 0), second = leaves.history_len > 1 ? LeafOf(history, 1) : 0.0f;
  const float scale = LeafOf(leaves.scale, q), parity = LeafOf(slots, state::kParity);

  float highest = 0.0f, lowest = 0.0f;
  ForEachInBatches(
      1, leaves.history_len, [&](int64_t i) { return LeafOf(history, i); },
      [&](int64_t, float value) {
        highest = state::Max(highest, value);
        lowest = state::Min(lowest, value);
      });
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    highest = state::Max(highest, __shfl_xor_sync(kFullMask, highest, offset));
    lowest = state::Min(lowest, __shfl_xor_sync(kFullMask, lowest, offset));
  }
  if (threadIdx.x % kWarp == 0) {
    highest_of[threadIdx.x / kWarp] = highest;
    lowest_of[threadIdx.x / kWarp] = lowest;
  }
  if (threadIdx.x < kWarp) {
    state::Sums sums;
    state::Uses uses;
    const float newest = NewestOf(slots, first, sums, uses);
    if (threadIdx.x == 0) {
      shared_sums = sums;
      shared_uses = uses;
      shared_newest = newest;
    }
  }
  __syncthreads();

  state::Sums sums = shared_sums;
  sums.highest = sums.lowest = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) {
    sums.highest = state::Max(sums.highest, highest_of[warp]);
    sums.lowest = state::Min(sums.lowest, lowest_of[warp]);
  }
  Row row{shared_uses, shared_newest, {}};
  row.view = state::Read(sums, row.uses, row.newest, second, scale, parity, MaxOf(leaves, q), leaves.power_of_margin,
                         leaves.most_recent);
  return row;
}

__global__ void __launch_bounds__(kThreads) ReadKernel(const __grid_constant__ ReadParams params) {
  AwaitPredecessor();
  const int q = blockIdx.x;
  const Row row = Decode(params.leaves, q);
  if (threadIdx.x == 0) *params.scales[q] = row.view.scale;
}

__global__ void __launch_bounds__(kThreads) WriteKernel(const __grid_constant__ WriteParams params) {
  AwaitPredecessor();
  const int q = blockIdx.x;
  const int64_t length = params.leaves.history_len;
  const float* history = params.leaves.amax_history + q * length;
  float* new_history = params.amax_history + q * length;
  float* new_uses = params.uses + static_cast<int64_t>(q) * state::kUses;
  if (params.amaxes[q] == nullptr) {
    for (int64_t i = threadIdx.x; i < length; i += kThreads) new_history[i] = 0.0f;
    if (threadIdx.x < state::kUses) new_uses[threadIdx.x] = 0.0f;
    if (threadIdx.x == 0) params.scale[q] = 0.0f;
    return;
  }
  const float amax = state::UsableAmax(*params.amaxes[q]);
  const Row row = Decode(params.leaves, q);
  ForEachInBatches(
      0, length - 1, [&](int64_t i) { return make_float2(LeafOf(history, i), LeafOf(history, i + 1)); },
      [&](int64_t i, float2 slots) {
        new_history[i + 1] = state::Encode(state::Shifted(i, slots.x, slots.y, row.uses, row.newest));
      });
  if (threadIdx.x < state::kUses) new_uses[threadIdx.x] = state::EncodeUses(threadIdx.x, row.view, amax);
  if (threadIdx.x == 0) {
    new_history[0] = state::Encode(amax);
    params.scale[q] = state::EncodeScale(row.view, amax, MaxOf(params.leaves, q), params.leaves.margin);
  }
}

// The leaves of `count` quantizers from the one numbered `first`.
Leaves Part(const StateLeaves& leaves, int64_t first, int64_t count) {
  Leaves part{};
  part.history_len = leaves.history_len;
  part.amax_history = leaves.amax_history + first * leaves.history_len;
  part.scale = leaves.scale + first;
  part.uses = leaves.uses + first * state::kUses;
  part.margin = leaves.margin;
  part.power_of_margin = std::ldexp(1.0f, -leaves.margin);
  part.most_recent = leaves.most_recent;
  for (int64_t i = 0; i < count; ++i) {
    if (leaves.formats[first + i] == DType::kE5M2) part.e5m2[i / 32] |= 1u << (i % 32);
  }
  return part;
}

}  // namespace

cudaError_t LaunchScaleRead(const ScaleReadArgs& args, cudaStream_t stream) {
  const auto quantizers = static_cast<int64_t>(args.scales.size());
  for (int64_t first = 0; first < quantizers; first += kMaxQuantizers) {
    const int64_t count = std::min<int64_t>(kMaxQuantizers, quantizers - first);
    ReadParams params{};
    params.leaves = Part(args.leaves, first, count);
    std::copy_n(args.scales.begin() + first, count, params.scales);
    const cudaError_t error = Launch(ReadKernel, static_cast<unsigned>(count), kThreads, stream, params);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchScaleWrite(const ScaleWriteArgs& args, cudaStream_t stream) {
  const auto quantizers = static_cast<int64_t>(args.amaxes.size());
  for (int64_t first = 0; first < quantizers; first += kMaxQuantizers) {
    const int64_t count = std::min<int64_t>(kMaxQuantizers, quantizers - first);
    WriteParams params{};
    params.leaves = Part(args.leaves, first, count);
    std::copy_n(args.amaxes.begin() + first, count, params.amaxes);
    params.amax_history = args.amax_history + first * args.leaves.history_len;
    params.scale = args.scale + first;
    params.uses = args.uses + first * state::kUses;
    const cudaError_t error = Launch(WriteKernel, static_cast<unsigned>(count), kThreads, stream, params);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace te_jax::kernels
