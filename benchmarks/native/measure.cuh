// What native benchmarks share: pseudo-random numbers, time, and the clock at which it passes.
#ifndef TE_JAX_BENCHMARKS_NATIVE_MEASURE_CUH_
#define TE_JAX_BENCHMARKS_NATIVE_MEASURE_CUH_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "benchmarks/native/cublaslt.cuh"

namespace te_jax::kernels {

__device__ inline uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}
__device__ inline float Uniform(uint64_t i, uint64_t seed) {
  return (Hash(i * 2654435761ull + (seed << 40)) + 0.5f) * 0x1p-32f;
}
__device__ inline float Normal(uint64_t i, uint64_t seed) {
  return sqrtf(-2 * logf(Uniform(i, seed))) * cospif(2 * Uniform(i, seed + 1));
}

// cycles[sm], nanoseconds[sm]: what the multiprocessors' counters say now.
static __global__ void ReadClocks(int64_t* cycles, int64_t* nanoseconds) {
  uint32_t sm;
  asm("mov.u32 %0, %%smid;" : "=r"(sm));
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  cycles[sm] = clock64();
  nanoseconds[sm] = now;
}
class Stopwatch {
 public:
  static constexpr int kMost = 256;
  struct Reading {
    double ms, mhz;
  };
  Stopwatch() {
    CHECK_CUDA(cudaMalloc(&device_, sizeof counters_));
    for (auto& e : events_) CHECK_CUDA(cudaEventCreate(&e));
  }
  ~Stopwatch() {
    cudaFree(device_);
    for (auto& e : events_) cudaEventDestroy(e);
  }
  template <class Work>
  Reading Measure(int times, Work work) {
    CHECK_CUDA(cudaMemsetAsync(device_, 0, sizeof counters_));
    ReadClocks<<<132, 1>>>(device_, device_ + kMost);
    CHECK_CUDA(cudaEventRecord(events_[0]));
    for (int i = 0; i < times; ++i) work(i);
    CHECK_CUDA(cudaEventRecord(events_[1]));
    ReadClocks<<<132, 1>>>(device_ + 2 * kMost, device_ + 3 * kMost);
    CHECK_CUDA(cudaMemcpy(counters_, device_, sizeof counters_, cudaMemcpyDeviceToHost));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, events_[0], events_[1]));
    std::vector<double> mhz;
    for (int i = 0; i < kMost; ++i) {
      const int64_t* c = counters_ + i;
      if (c[0] != 0 && c[2 * kMost] != 0)
        mhz.push_back(1e3 * (c[2 * kMost] - c[0]) / std::max<int64_t>(1, c[3 * kMost] - c[kMost]));
    }
    std::sort(mhz.begin(), mhz.end());
    return {ms / times, mhz.empty() ? 0 : mhz[mhz.size() / 2]};
  }

 private:
  int64_t* device_ = nullptr;
  int64_t counters_[4 * kMost];
  cudaEvent_t events_[2];
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_BENCHMARKS_NATIVE_MEASURE_CUH_
