#include "csrc/gemm/timing.h"

#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "csrc/gemm/bench.h"
#include "csrc/gemm/own_kernels.h"

namespace te_jax::gemm {
namespace {

constexpr int kFirstRounds = 3;    // of all candidates, after one that warms up
constexpr int kFinalRounds = 10;   // of the finalists
constexpr size_t kFinalists = 4;   // and the heuristic's first
constexpr std::chrono::seconds kQuiet{1};

// Lets this thread allocate and wait while it captures a graph on another stream. What fails meanwhile leaves no error
// behind that a later launch would report as its own.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
    (void)cudaGetLastError();
  }
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
}

Choice First(const std::vector<AlgorithmBlob>& candidates, std::string note) {
  Choice choice;
  choice.algorithm = candidates.front();
  choice.source = Choice::kFirst;
  choice.note = std::move(note);
  return choice;
}

}  // namespace

Choice ChooseByTiming(Calls& calls, cublasLtHandle_t handle, const Problem& problem, const GemmArgs& args,
                      const std::vector<AlgorithmBlob>& candidates, cudaStream_t stream) {
  if (candidates.size() == 1) return First(candidates, "the only candidate");
  const RelaxedCapture relaxed;
  AwaitQuiet(stream);
  Bench bench(problem.desc, args);
  if (!bench.error().empty()) return First(candidates, bench.error());
  const auto operation = MakeOperation(calls, problem.plan, bench.args());
  if (!calls.ok()) return First(candidates, calls.status().message);

  const auto launch = [&](size_t i, void* workspace, cudaStream_t on) {
    if (const OwnKernel* own = OwnKernelOf(candidates[i], problem.desc)) {
      return own->launch(bench.args(), on) == cudaSuccess;
    }
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
  Choice choice;
  choice.algorithm = candidates[finalists[fastest]];
  choice.source = Choice::kTimed;
  choice.time_us = times[fastest];
  choice.first_us = times.front();
  choice.candidates = static_cast<int>(candidates.size());
  return choice;
}

}  // namespace te_jax::gemm
