// Collective matmuls between the GPUs of one process, every schedule, beside the GEMM alone.
//
//   collective_bench burst|sustained rs|ag MxKxN...    one JSON line a schedule
//
// A rank is a thread. M, K and N are those of the whole product: x [M, K/t] for rs, [M/t, K] for ag. Data are random
// FP8 with fast accumulation and a bias; `burst` times after 30 ms of idling, at full clocks, `sustained` without rest.
// The values are checked by csrc/tests/cuda/collective_test.cc.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "csrc/tests/cuda/collective_problem.h"

namespace te_jax::comm {
namespace {

// All ranks wait for each other: threads that queue work for one GPU each start together.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void Wait() {
    const int generation = generation_.load();
    if (arrived_.fetch_add(1) + 1 == count_) {
      arrived_ = 0;
      ++generation_;
    } else {
      while (generation_.load() == generation) std::this_thread::yield();
    }
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0}, generation_{0};
};

// us per call: the median over repetitions of the slowest rank's time / calls.
double Time(DeviceGroup& group, int calls, int repetitions, bool rests,
            const std::function<void(int, cudaStream_t)>& queue) {
  Barrier barrier(group.ranks());
  std::vector<std::vector<float>> ms(group.ranks());
  OnAllRanks(group, [&](int r, cudaStream_t stream) {
    cudaEvent_t begin = nullptr, end = nullptr;
    CUDA_OK(cudaEventCreate(&begin));
    CUDA_OK(cudaEventCreate(&end));
    for (int i = 0; i < 3; ++i) queue(r, stream);
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      if (rests) {
        CUDA_OK(cudaStreamSynchronize(stream));
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
      }
      barrier.Wait();
      queue(r, stream);  // the first one waits for the other rank to start
      CUDA_OK(cudaEventRecord(begin, stream));
      for (int i = 0; i < calls; ++i) queue(r, stream);
      CUDA_OK(cudaEventRecord(end, stream));
      CUDA_OK(cudaEventSynchronize(end));
      float elapsed = 0;
      CUDA_OK(cudaEventElapsedTime(&elapsed, begin, end));
      ms[r].push_back(elapsed);
    }
  });
  std::vector<double> slowest;
  for (int i = 0; i < repetitions; ++i) {
    float worst = 0;
    for (const auto& times : ms) worst = std::max(worst, times[i]);
    slowest.push_back(worst * 1e3 / calls);
  }
  std::sort(slowest.begin(), slowest.end());
  return slowest[slowest.size() / 2];
}

int Measure(bool rests, bool scatter, int count, char** shapes) {
  const int calls = 10, repetitions = rests ? 9 : 15;
  for (int i = 0; i < count; ++i) {
    Shape shape{scatter, 0, 0, 0};
    long m = 0, k = 0, n = 0;
    if (std::sscanf(shapes[i], "%ldx%ldx%ld", &m, &k, &n) != 3) return 64;
    shape.m = m, shape.k = k, shape.n = n;
    const int t = NumDevices();
    const size_t slot = scatter ? static_cast<size_t>(m / t * n * 2) : static_cast<size_t>(m / t * k);
    auto group = MakeGroup(t, slot);
    std::vector<Operands> operands;
    for (int r = 0; r < t; ++r) {
      CUDA_OK(cudaSetDevice(group->rank(r).device()));
      operands.push_back(MakeOperands(shape, t, r));
    }
    // The GEMM of a rank alone, on all GPUs at once: all rows, the same number of products.
    std::vector<GemmArgs> alone;
    for (int r = 0; r < t; ++r) {
      GemmArgs args = operands[r].gemm;
      CUDA_OK(cudaSetDevice(group->rank(r).device()));
      args.m = m;
      args.out = Allocate(static_cast<size_t>(m * args.n) * 2);
      args.lhs = scatter ? args.lhs : Allocate(static_cast<size_t>(m * k));
      if (!scatter) CUDA_OK(kernels::LaunchRandom(const_cast<void*>(args.lhs), DType::kE4M3, m * k, 7, nullptr));
      Require(gemm::Launch(args, group->rank(r).workspace(), nullptr));
      CUDA_OK(cudaDeviceSynchronize());
      alone.push_back(args);
    }
    const double gemm_us = Time(*group, calls, repetitions, rests, [&](int r, cudaStream_t stream) {
      Require(gemm::Launch(alone[r], group->rank(r).workspace(), stream));
    });
    for (const Schedule& schedule : SchedulesOf(scatter)) {
      std::vector<CollectiveGemm> all;
      for (int r = 0; r < t; ++r) all.push_back(CallOf(shape, schedule, t, operands[r]));
      WarmUp(*group, all);
      const double us = Time(*group, calls, repetitions, rests, [&](int r, cudaStream_t stream) {
        Require(RunOnStreams(all[r], group->rank(r), stream));
      });
      std::printf("{\"op\": \"%s\", \"m\": %ld, \"k\": %ld, \"n\": %ld, \"ranks\": %d, \"mode\": \"%s\", ",
                  scatter ? "rs" : "ag", m, k, n, t, rests ? "burst" : "sustained");
      std::printf("\"schedule\": \"%s\", \"us\": %.1f, \"gemm_us\": %.1f, \"gemm_share\": %.3f}\n",
                  schedule.name().c_str(), us, gemm_us, gemm_us / us);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace te_jax::comm

int main(int argc, char** argv) {
  if (argc >= 4 && (std::string(argv[1]) == "burst" || std::string(argv[1]) == "sustained")) {
    return te_jax::comm::Measure(std::string(argv[1]) == "burst", std::string(argv[2]) == "rs", argc - 3, argv + 3);
  }
  std::fprintf(stderr, "usage: %s burst|sustained rs|ag MxKxN...\n", argv[0]);
  return 64;
}
