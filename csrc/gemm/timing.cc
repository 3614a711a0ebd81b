#include "csrc/gemm/timing.h"

#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "csrc/core/fp8.h"
#include "csrc/kernels/random.h"

namespace te_jax::gemm {
namespace {

constexpr int kFirstRounds = 3;    // of all candidates, after one that warms up
constexpr int kFinalRounds = 10;   // of the finalists
constexpr size_t kFinalists = 4;   // and the heuristic's first
constexpr size_t kFlushBytes = size_t{128} << 20;  // more than twice the L2 cache of an H200
constexpr size_t kAlignment = 256;
constexpr std::chrono::seconds kQuiet{1};

// Lets this thread allocate and wait while it captures a graph on another stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Not cudaStreamSynchronize: a collective on the stream may wait for a device whose thread waits for this one's choice.
void AwaitQuiet(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) return;
  const auto until = std::chrono::steady_clock::now() + kQuiet;
  while (cudaStreamQuery(stream) == cudaErrorNotReady && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  (void)cudaGetLastError();  // "not ready" is no error
}

size_t BytesOf(DType dtype) { return IsFP8(dtype) ? 1 : dtype == DType::kF32 ? 4 : 2; }

// A stream, and one block of memory with the operands and results of a GEMM in it.
class Bench {
 public:
  Bench(const Problem& problem, const GemmArgs& args) : args_(args) {
    if (!Ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking))) return;
    Place(problem.desc);
    const size_t bytes = used_;
    if (!Ok(cudaMallocAsync(&memory_, bytes, stream_))) {
      error_ += " (" + std::to_string(bytes) + " bytes for timing)";
      return;
    }
    used_ = 0;
    Place(problem.desc);
    Fill(problem.desc);
  }
  ~Bench() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
    if (stream_ != nullptr) {
      cudaStreamSynchronize(stream_);
      cudaStreamDestroy(stream_);
    }
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const std::string& error() const { return error_; }
  const GemmArgs& args() const { return args_; }

  // The median time in us of `launch(i, workspace, stream)` for each i in `which`, taken in turns and from memory;
  // infinity for one that fails.
  template <class Launch>
  std::vector<float> Times(const std::vector<size_t>& which, int rounds, Launch&& launch) {
    std::vector<std::vector<float>> times(which.size());
    std::vector<bool> good(which.size(), true);
    while (events_.size() < 2 * which.size() && error_.empty()) {
      cudaEvent_t event = nullptr;
      if (Ok(cudaEventCreate(&event))) events_.push_back(event);
    }
    for (int round = 0; round < rounds && error_.empty(); ++round) {
      for (size_t i = 0; i < which.size(); ++i) {
        if (!good[i]) continue;
        Ok(cudaMemsetAsync(flush_, 0, kFlushBytes, stream_));
        Ok(cudaEventRecord(events_[2 * i], stream_));
        good[i] = launch(which[i], workspace_, stream_);
        Ok(cudaEventRecord(events_[2 * i + 1], stream_));
      }
      if (!Ok(cudaStreamSynchronize(stream_))) break;
      for (size_t i = 0; i < which.size(); ++i) {
        float ms = 0.0f;
        if (good[i] && Ok(cudaEventElapsedTime(&ms, events_[2 * i], events_[2 * i + 1]))) times[i].push_back(1e3f * ms);
      }
    }
    std::vector<float> medians(which.size(), std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < which.size(); ++i) {
      if (good[i]) medians[i] = Median(times[i]);
    }
    return medians;
  }

 private:
  bool Ok(cudaError_t error) {
    if (error != cudaSuccess) {
      if (error_.empty()) error_ = cudaGetErrorString(error);
      (void)cudaGetLastError();  // reported as the note of a choice, not as the error of a later launch
    }
    return error == cudaSuccess;
  }

  template <class T>
  void Take(T*& pointer, size_t bytes) {
    pointer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<char*>(memory_) + used_);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Gives every pointer of args_ a place; without memory, counts the bytes.
  void Place(const GemmDesc& desc) {
    const auto m = static_cast<size_t>(desc.m), n = static_cast<size_t>(desc.n), k = static_cast<size_t>(desc.k);
    Take(args_.lhs, m * k * BytesOf(desc.lhs));
    Take(args_.rhs, n * k * BytesOf(desc.rhs));
    Take(args_.out, m * n * BytesOf(desc.out));
    if (desc.accumulates && !desc.in_place) Take(args_.c, m * n * BytesOf(desc.c));
    if (desc.in_place) args_.c = args_.out;
    if (desc.has_bias) Take(args_.bias, n * BytesOf(desc.bias_dtype));
    if (IsFP8(desc.lhs)) Take(args_.lhs_scale_inv, sizeof(float));
    if (IsFP8(desc.lhs)) Take(args_.rhs_scale_inv, sizeof(float));
    if (IsFP8(desc.out)) Take(args_.out_scale, sizeof(float));
    if (desc.has_amax) Take(args_.amax, sizeof(float));
    Take(workspace_, kWorkspaceBytes);
    Take(flush_, kFlushBytes);
  }

  void Fill(const GemmDesc& desc) {
    const auto random = [&](const void* values, DType dtype, int64_t size, uint32_t seed) {
      if (values != nullptr) Ok(kernels::LaunchRandom(const_cast<void*>(values), dtype, size, seed, stream_));
    };
    random(args_.lhs, desc.lhs, desc.m * desc.k, 1);
    random(args_.rhs, desc.rhs, desc.n * desc.k, 2);
    random(args_.out, desc.out, desc.m * desc.n, 3);
    if (desc.accumulates && !desc.in_place) random(args_.c, desc.c, desc.m * desc.n, 4);
    if (desc.has_bias) random(args_.bias, desc.bias_dtype, desc.n, 5);
    // 0x3a3a3a3a is 0.0007: products of FP8 operands come out near 1.
    for (const float* scale : {args_.lhs_scale_inv, args_.rhs_scale_inv, args_.out_scale}) {
      if (scale != nullptr) Ok(cudaMemsetAsync(const_cast<float*>(scale), 0x3a, sizeof(float), stream_));
    }
    if (args_.amax != nullptr) Ok(cudaMemsetAsync(args_.amax, 0, sizeof(float), stream_));
  }

  GemmArgs args_;
  cudaStream_t stream_ = nullptr;
  void* memory_ = nullptr;
  size_t used_ = 0;
  void* workspace_ = nullptr;
  void* flush_ = nullptr;
  std::vector<cudaEvent_t> events_;
  std::string error_;
};

Choice ChoiceOf(const cublasLtMatmulAlgo_t& algorithm) {
  Choice choice;
  static_assert(sizeof algorithm == sizeof choice.algorithm);
  std::memcpy(choice.algorithm.data(), &algorithm, sizeof algorithm);
  return choice;
}

Choice First(const std::vector<cublasLtMatmulAlgo_t>& candidates, std::string note) {
  Choice choice = ChoiceOf(candidates.front());
  choice.source = Choice::kFirst;
  choice.note = std::move(note);
  return choice;
}

}  // namespace

Choice ChooseByTiming(Calls& calls, cublasLtHandle_t handle, const Problem& problem, const GemmArgs& args,
                      const std::vector<cublasLtMatmulAlgo_t>& candidates, cudaStream_t stream) {
  if (candidates.size() == 1) return First(candidates, "the only candidate");
  const RelaxedCapture relaxed;
  AwaitQuiet(stream);
  Bench bench(problem, args);
  if (!bench.error().empty()) return First(candidates, bench.error());
  const auto operation = MakeOperation(calls, problem.plan, bench.args());
  if (!calls.ok()) return First(candidates, calls.status().message);

  const auto launch = [&](size_t i, void* workspace, cudaStream_t on) {
    Calls attempt;  // a candidate that can't be launched is no error
    Multiply(attempt, handle, operation.get(), problem, bench.args(), candidates[i], workspace, on);
    return attempt.ok();
  };
  std::vector<size_t> all(candidates.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  bench.Times(all, 1, launch);
  const std::vector<size_t> finalists = Finalists(bench.Times(all, kFirstRounds, launch), kFinalists);
  const std::vector<float> times = bench.Times(finalists, kFinalRounds, launch);
  if (!bench.error().empty()) return First(candidates, bench.error());

  const size_t fastest = Fastest(times);
  if (times[fastest] == std::numeric_limits<float>::infinity()) return First(candidates, "no candidate could be run");
  Choice choice = ChoiceOf(candidates[finalists[fastest]]);
  choice.source = Choice::kTimed;
  choice.time_us = times[fastest];
  choice.first_us = times.front();
  choice.candidates = static_cast<int>(candidates.size());
  return choice;
}

}  // namespace te_jax::gemm
