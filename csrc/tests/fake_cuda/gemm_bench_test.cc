// What a Bench leaves behind where a call of CUDA fails, one after the other: nothing. The runtime is one of this
// file's, which counts what is alive; there is no GPU.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "csrc/gemm/bench.h"
#include "csrc/gemm/gemm.h"
#include "csrc/kernels/random.h"
#include "csrc/tests/check.h"

namespace {

struct Runtime {
  int calls = 0;
  int failing = -1;  // the number of the call that fails; -1: none
  cudaError_t last = cudaSuccess;
  size_t free = size_t{8} << 30;  // bytes of the device
  size_t allocated = 0;
  int streams = 0, pools = 0, events = 0, allocations = 0;
  bool freed_late = false;  // memory was freed after its pool or stream
  int waits = 0;            // since memory was freed
};
Runtime runtime;

cudaError_t Call() {
  if (runtime.calls++ != runtime.failing) return cudaSuccess;
  return runtime.last = cudaErrorMemoryAllocation;
}

template <class Handle>
cudaError_t Create(Handle* handle, int* count) {
  if (const cudaError_t error = Call(); error != cudaSuccess) return error;
  *handle = reinterpret_cast<Handle>(uintptr_t{256});
  ++*count;
  return cudaSuccess;
}

cudaError_t Destroy(int* count) {
  --*count;
  return cudaSuccess;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, Call(); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = runtime.free;
  *total = size_t{16} << 30;
  return Call();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return Create(stream, &runtime.streams); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return Destroy(&runtime.streams); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return ++runtime.waits, Call(); }
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) { return Create(pool, &runtime.pools); }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) {
  EXPECT(runtime.waits > 0);  // otherwise what was freed is given back at some later time
  return Destroy(&runtime.pools);
}
cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t, cudaStream_t) {
  const cudaError_t error = Create(memory, &runtime.allocations);
  if (error == cudaSuccess) runtime.allocated = bytes;
  return error;
}
cudaError_t cudaFreeAsync(void*, cudaStream_t) {
  runtime.freed_late = runtime.streams == 0 || runtime.pools == 0;
  runtime.waits = 0;
  return Destroy(&runtime.allocations);
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return Call(); }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return Create(event, &runtime.events); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return Destroy(&runtime.events); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return Call(); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 0.5f, Call(); }
const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
cudaError_t cudaGetLastError() { return std::exchange(runtime.last, cudaSuccess); }
}

namespace te_jax {
namespace kernels {

cudaError_t LaunchRandom(void*, DType, int64_t, uint32_t, cudaStream_t) { return Call(); }

}  // namespace kernels

namespace gemm {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr size_t kMiB = size_t{1} << 20;

struct Outcome {
  std::string error;
  std::vector<float> times;
};

// Times two candidates of a GEMM with operands of 1 MiB, then expects that nothing is left.
Outcome Run(size_t free, int failing) {
  runtime = {};
  runtime.free = free;
  runtime.failing = failing;
  GemmArgs args;
  args.m = args.n = args.k = 1024;
  args.out_dtype = DType::kE4M3;
  float amax = 0.0f;
  args.amax = &amax;
  Outcome outcome;
  {
    Bench bench(DescOf(args), args);
    if (bench.error().empty()) {
      EXPECT(bench.args().amax != &amax);
      outcome.times = bench.Times({0, 1}, 3, [](size_t i, void*, cudaStream_t) { return i == 1; });
    }
    outcome.error = bench.error();
  }
  EXPECT_EQ(runtime.streams, 0);
  EXPECT_EQ(runtime.pools, 0);
  EXPECT_EQ(runtime.events, 0);
  EXPECT_EQ(runtime.allocations, 0);
  EXPECT(!runtime.freed_late);
  EXPECT_EQ(static_cast<int>(runtime.last), static_cast<int>(cudaSuccess));
  return outcome;
}

TEST(AFailedCandidateIsNoError) {
  const Outcome outcome = Run(8192 * kMiB, -1);
  EXPECT(outcome.error.empty());
  EXPECT(outcome.times == (std::vector<float>{kNever, 500.0f}));
  EXPECT(runtime.allocated >= 3 * kMiB + kWorkspaceBytes);
}

TEST(AnyCallMayFail) {
  (void)Run(8192 * kMiB, -1);
  const int calls = runtime.calls;
  EXPECT(calls > 20);
  for (int failing = 0; failing < calls - 1; ++failing) {  // the last one waits for what was freed
    const Outcome outcome = Run(8192 * kMiB, failing);
    EXPECT(outcome.error == "out of memory");
    for (float time : outcome.times) EXPECT_EQ(time, kNever);
  }
}

TEST(SomeMemoryIsLeftToOthers) {
  (void)Run(8192 * kMiB, -1);
  const size_t needed = runtime.allocated;
  EXPECT(Run(needed + 256 * kMiB, -1).error.empty());
  const Outcome outcome = Run(needed + 255 * kMiB, -1);
  EXPECT(outcome.error.find("leaves 256 MiB") != std::string::npos);
  EXPECT_EQ(runtime.allocated, size_t{0});
}

}  // namespace
}  // namespace gemm
}  // namespace te_jax

TEST_MAIN
