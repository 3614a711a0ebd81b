// Collective matmuls on GPUs, every schedule, against sums of float32 products; several ranks share a GPU where there
// are fewer, so that sums of more than two partial results are tested anywhere.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "csrc/tests/check.h"
#include "csrc/tests/cuda/collective_problem.h"

namespace te_jax::comm {
namespace {

std::vector<Operands> OperandsOf(const Shape& shape, DeviceGroup& group) {
  std::vector<Operands> operands;
  for (int r = 0; r < group.ranks(); ++r) {
    CUDA_OK(cudaSetDevice(group.rank(r).device()));
    operands.push_back(MakeOperands(shape, group.ranks(), r));
  }
  return operands;
}

size_t OutElements(const Shape& shape, int ranks) {
  return static_cast<size_t>(shape.scatter ? shape.m / ranks * shape.n : shape.m * shape.n / ranks);
}

// A partial result and the sum are rounded once each, which gives 1.7e-3 to 2.1e-3 of the whole result; rounding the
// sum twice gives 2.4e-3 and more.
constexpr double kTolerance = 2.2e-3;

void TestAll(DeviceGroup& group, const Shape& shape) {
  const int t = group.ranks();
  const std::vector<Operands> operands = OperandsOf(shape, group);
  for (const Schedule& schedule : SchedulesOf(shape.scatter)) {
    std::vector<CollectiveGemm> calls;
    for (int r = 0; r < t; ++r) calls.push_back(CallOf(shape, schedule, t, operands[r]));
    WarmUp(group, calls);
    std::vector<std::vector<uint16_t>> first;
    for (int round = 0; round < 3; ++round) {
      OnAllRanks(group, [&](int r, cudaStream_t stream) {
        for (int i = 0; i < 5; ++i) Require(RunOnStreams(calls[r], group, r, stream));
      });
      for (int r = 0; r < t; ++r) {
        const auto out = ToHost<uint16_t>(calls[r].gemm.out, OutElements(shape, t));
        if (round == 0) first.push_back(out);
        EXPECT(out == first[r]);  // bit for bit, every time
      }
    }
    const Error error = Compare(shape, operands, group);
    EXPECT(error.frobenius < kTolerance);
    std::printf("  %s %ldx%ldx%ld, %d ranks, %s: error %.2e\n", shape.scatter ? "rs" : "ag", static_cast<long>(shape.m),
                static_cast<long>(shape.k), static_cast<long>(shape.n), t, schedule.name().c_str(), error.frobenius);
    if (!schedule.keep) continue;
    for (int r = 0; r < t; ++r) {
      const auto block = static_cast<size_t>(shape.m / t * shape.k);
      for (int source = 0; source < t; ++source) {
        if (source == r) continue;
        const auto got = ToHost<uint8_t>(static_cast<char*>(operands[r].kept) + source * block, block);
        EXPECT(got == ToHost<uint8_t>(operands[source].gemm.lhs, block));
      }
    }
  }
}

void TestRanks(int t) {
  const auto group = MakeGroup(t, size_t{16} << 20);
  for (const bool scatter : {true, false}) {
    TestAll(*group, {scatter, 512 * t, 512 * t, 256 * t});
    TestAll(*group, {scatter, 400 * t, 256 * t, 512 * t});  // pieces of different heights
    TestAll(*group, {scatter, 16 * t, 256 * t, 128 * t});
  }
}

TEST(TwoRanks) { TestRanks(2); }
TEST(ThreeRanks) { TestRanks(3); }
TEST(FourRanks) { TestRanks(4); }

// A peer that doesn't come: NaN instead of wrong numbers, a record that says who waited for whom, and no further call.
TEST(ALatePeer) {
  for (const bool scatter : {true, false}) {
    const Shape shape{scatter, 512, 512, 512};
    const auto group = MakeGroup(2, size_t{16} << 20);
    const std::vector<Operands> operands = OperandsOf(shape, *group);
    std::vector<CollectiveGemm> calls;
    for (int r = 0; r < 2; ++r) calls.push_back(CallOf(shape, {2, false, false}, 2, operands[r]));
    WarmUp(*group, calls);
    CUDA_OK(cudaSetDevice(group->rank(0).device()));
    calls[0].timeout_ns = 50'000'000;
    EXPECT_EQ(static_cast<int>(RunOnStreams(calls[0], *group, 0, nullptr).code), static_cast<int>(gemm::Status::kOk));
    CUDA_OK(cudaDeviceSynchronize());
    const auto* record = group->rank(0).record();
    EXPECT_EQ(record->failed, 1u);
    EXPECT_EQ(record->source, 1);
    EXPECT_EQ(record->epoch, 1u);
    int nans = 0;
    const auto out = ToHost<uint16_t>(operands[0].gemm.out, OutElements(shape, 2));
    for (const uint16_t bits : out) nans += std::isnan(FromBF16(bits));
    EXPECT_EQ(nans, static_cast<int>(scatter ? out.size() : out.size() / 2));  // of a gather: the peer's rows
    const gemm::Status refused = RunOnStreams(calls[0], *group, 0, nullptr);
    EXPECT(refused.code == gemm::Status::kInternal);
    EXPECT_CONTAINS(refused.message, "rank 0 waited");
  }
}

}  // namespace
}  // namespace te_jax::comm

int main() {
  // Ranks that share a GPU must not share a hardware queue, where one's wait would be in front of what it waits for, and
  // a kernel can't be loaded while one spins.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  return te_jax::testing::RunAll();
}
