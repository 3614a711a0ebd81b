#include "csrc/kernels/channel.h"

#include <algorithm>

#include "csrc/core/fp8.h"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/fp8.cuh"
#include "csrc/kernels/vector.cuh"

namespace te_jax::kernels {
namespace {

constexpr int kThreads = 256;

__device__ inline uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline uint32_t LoadAcquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__global__ void PostKernel(uint32_t* flag, uint32_t epoch) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

__device__ bool Arrives(const AwaitArgs& args) {
  volatile AwaitRecord* record = args.record;
  const uint64_t start = Nanoseconds();
  for (;;) {
    const uint32_t seen = LoadAcquire(args.flag);
    if (static_cast<int32_t>(seen - args.epoch) >= 0) return true;
    if (record->failed != 0) return false;
    if (Nanoseconds() - start > args.timeout_ns) {
      record->source = args.source;
      record->chunk = args.chunk;
      record->epoch = args.epoch;
      record->seen = seen;
      __threadfence_system();
      record->failed = 1;
      __threadfence_system();
      return false;
    }
    __nanosleep(64);
  }
}

__global__ void __launch_bounds__(kThreads) AwaitKernel(AwaitArgs args) {
  __shared__ bool arrived;
  if (threadIdx.x == 0) arrived = Arrives(args);
  __syncthreads();
  if (arrived) return;
  for (size_t i = threadIdx.x; i < args.bytes / 4; i += kThreads) static_cast<uint32_t*>(args.data)[i] = args.nan;
}

constexpr int kChunk = 8;

// T: of slots, and of the result if it isn't FP8. B: of the bias.
template <class T, class B, bool kFP8>
__global__ void __launch_bounds__(kThreads) SumPartialsKernel(SumPartialsArgs args) {
  const int64_t size = args.rows * args.cols;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kChunk;
  const float scale = kFP8 ? *args.out_scale : 1.0f;
  float amax = 0.0f;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kChunk; i < size; i += stride) {
    float sum[kChunk] = {};
    for (int rank = 0; rank < args.ranks; ++rank) {
      float values[kChunk];
      if (rank == args.own) {
        Chunk<float, kChunk> chunk;
        chunk.Load(args.partial + i);
        Unpack(chunk, values);
      } else {
        Chunk<T, kChunk> chunk;  // not through the read-only path: a peer wrote it while this program ran
        const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(args.slots[rank]) + i);
#pragma unroll
        for (int j = 0; j < Chunk<T, kChunk>::kVectors; ++j) chunk.vector[j] = __ldcg(from + j);
        Unpack(chunk, values);
      }
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sum[j] = rank == 0 ? values[j] : __fadd_rn(sum[j], values[j]);
    }
    if (args.bias != nullptr) {
      const B* bias = static_cast<const B*>(args.bias) + i % args.cols;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sum[j] = __fadd_rn(sum[j], static_cast<float>(bias[j]));
    }
    if constexpr (kFP8) {
      float magnitude = 0.0f, scaled[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) magnitude = MaxMagnitude(magnitude, sum[j]);
      amax = MaxMagnitude(amax, magnitude);
      ScaleForCast(sum, magnitude, scale, scaled);
      const bool e5m2 = args.out_dtype == DType::kE5M2;
      const uint2 codes = {CastFour(scaled, e5m2), CastFour(scaled + 4, e5m2)};
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.out) + i) = codes;
    } else {
      StoreRounded<T>(sum, static_cast<T*>(args.out) + i);
    }
  }
  if (!kFP8 || args.amax == nullptr) return;
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(amax) & 0x7fffffffu);
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<uint32_t*>(args.amax), bits);
}

__global__ void MaximumKernel(const float* value, float* amax) { *amax = MaxMagnitude(*amax, *value); }

}  // namespace

cudaError_t LaunchPost(uint32_t* flag, uint32_t epoch, cudaStream_t stream) {
  PostKernel<<<1, 1, 0, stream>>>(flag, epoch);
  return cudaGetLastError();
}

cudaError_t LaunchAwait(const AwaitArgs& args, cudaStream_t stream) {
  AwaitKernel<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchMaximum(const float* value, float* amax, cudaStream_t stream) {
  MaximumKernel<<<1, 1, 0, stream>>>(value, amax);
  return cudaGetLastError();
}

cudaError_t LaunchSumPartials(const SumPartialsArgs& args, cudaStream_t stream) {
  return DispatchFloat(args.slot_dtype, [&](auto tag) {
    return DispatchFloat(args.bias_dtype, [&](auto bias_tag) {
      using T = typename decltype(tag)::type;
      using B = typename decltype(bias_tag)::type;
      const int64_t chunks = (args.rows * args.cols + kChunk - 1) / kChunk;
      const auto blocks = static_cast<unsigned>(std::min<int64_t>((chunks + kThreads - 1) / kThreads, 1 << 14));
      if (IsFP8(args.out_dtype)) {
        SumPartialsKernel<T, B, true><<<blocks, kThreads, 0, stream>>>(args);
      } else {
        SumPartialsKernel<T, B, false><<<blocks, kThreads, 0, stream>>>(args);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace te_jax::kernels
