// GEMMs on a GPU that are first seen while a graph is captured are timed all the same, and the graph is whole; those
// seen where memory is short run untimed.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "csrc/gemm/gemm.h"
#include "csrc/kernels/random.h"
#include "csrc/tests/check.h"

namespace te_jax::gemm {
namespace {

#define EXPECT_CUDA(call) EXPECT_EQ(static_cast<int>(call), static_cast<int>(cudaSuccess))

// The memory of one bf16 GEMM out [m, n] = lhs [m, k] . rhs [n, k] with bf16 operands.
struct Memory {
  GemmArgs args;
  void* workspace = nullptr;
  size_t out_bytes = 0;

  Memory(int64_t m, int64_t n, int64_t k) {
    args.m = m;
    args.n = n;
    args.k = k;
    args.lhs_dtype = args.rhs_dtype = DType::kBF16;
    const auto allocate = [](int64_t elements) {
      void* memory = nullptr;
      EXPECT_CUDA(cudaMalloc(&memory, static_cast<size_t>(2 * elements)));
      return memory;
    };
    void *lhs = allocate(m * k), *rhs = allocate(n * k);
    EXPECT_CUDA(kernels::LaunchRandom(lhs, DType::kBF16, m * k, 1, nullptr));
    EXPECT_CUDA(kernels::LaunchRandom(rhs, DType::kBF16, n * k, 2, nullptr));
    args.lhs = lhs;
    args.rhs = rhs;
    args.out = allocate(m * n);
    out_bytes = static_cast<size_t>(2 * m * n);
    EXPECT_CUDA(cudaMalloc(&workspace, kWorkspaceBytes));
    EXPECT_CUDA(cudaDeviceSynchronize());
  }

  std::vector<uint16_t> Out() const {
    std::vector<uint16_t> out(out_bytes / 2);
    EXPECT_CUDA(cudaMemcpy(out.data(), args.out, out_bytes, cudaMemcpyDeviceToHost));
    return out;
  }
  void Clear() const { EXPECT_CUDA(cudaMemset(args.out, 0, out_bytes)); }
};

bool Launches(const Memory& memory, cudaStream_t stream) {
  const Status status = Launch(memory.args, memory.workspace, stream);
  if (status.code != Status::kOk) std::printf("%s\n", status.message.c_str());
  return status.code == Status::kOk;
}

void TestCapture(cudaStreamCaptureMode mode, int64_t m) {
  const Memory memory(m, 512, 1024);
  const size_t known = Algorithms().All().size();
  cudaStream_t stream = nullptr;
  EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  memory.Clear();
  EXPECT_CUDA(cudaStreamBeginCapture(stream, mode));
  EXPECT(Launches(memory, stream));
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
  EXPECT_EQ(Algorithms().All().size(), known + 1);
  size_t nodes = 0;
  EXPECT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT(nodes >= 1 && nodes <= 3);  // the GEMM, and a reduction if it is split: nothing of the timing

  cudaGraphExec_t executable = nullptr;
  EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  EXPECT_CUDA(cudaGraphLaunch(executable, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  const auto replayed = memory.Out();
  memory.Clear();
  EXPECT(Launches(memory, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT(replayed == memory.Out());
  EXPECT(replayed != std::vector<uint16_t>(replayed.size(), 0));
}

TEST(ThreadLocalCapture) { TestCapture(cudaStreamCaptureModeThreadLocal, 512); }
TEST(RelaxedCapture) { TestCapture(cudaStreamCaptureModeRelaxed, 528); }
TEST(GlobalCapture) { TestCapture(cudaStreamCaptureModeGlobal, 544); }

TEST(SeveralThreadsChooseOnce) {
  const Memory memory(1024, 1024, 1024);
  const size_t known = Algorithms().All().size();
  std::vector<std::thread> threads;
  std::vector<int> launched(4, 0);
  for (size_t i = 0; i < launched.size(); ++i) {
    threads.emplace_back([&, i] {
      cudaStream_t stream = nullptr;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      launched[i] = Launches(memory, stream);
      cudaStreamSynchronize(stream);
    });
  }
  for (auto& thread : threads) thread.join();
  for (int good : launched) EXPECT(good == 1);
  EXPECT_EQ(Algorithms().All().size(), known + 1);
}

TEST(ChoicesAreTimed) {
  for (const auto& [key, choice] : Algorithms().All()) {
    std::printf("%s | %s | %s %.2f us, first %.2f us, %d candidates %s\n", key.device.c_str(), key.gemm.c_str(),
                NameOf(choice.source), static_cast<double>(choice.time_us), static_cast<double>(choice.first_us),
                choice.candidates, choice.note.c_str());
    EXPECT(choice.source == Choice::kTimed || choice.note == "the only candidate");
    EXPECT(choice.time_us <= choice.first_us);
  }
}

size_t FreeBytes() {
  size_t free = 0, total = 0;
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

TEST(TimingGivesItsMemoryBack) {
  const Memory memory(560, 512, 1024);
  const size_t before = FreeBytes();
  EXPECT(Launches(memory, nullptr));
  EXPECT(FreeBytes() + (size_t{64} << 20) > before);  // timing takes 160 MiB and more; kernels that are loaded stay
}

TEST(WithoutMemoryTheFirstRuns) {
  const Memory memory(576, 512, 1024);
  void* rest = nullptr;
  EXPECT_CUDA(cudaMalloc(&rest, FreeBytes() - (size_t{300} << 20)));
  EXPECT(Launches(memory, nullptr));
  EXPECT_CUDA(cudaGetLastError());
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_CUDA(cudaFree(rest));
  for (const auto& [key, choice] : Algorithms().All()) {
    if (key.gemm.find("m=576 ") == std::string::npos) continue;
    EXPECT(choice.source == Choice::kFirst);
    EXPECT_CONTAINS(choice.note, "MiB");
  }
}

}  // namespace
}  // namespace te_jax::gemm

TEST_MAIN
