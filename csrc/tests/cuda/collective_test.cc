// Collective matmuls on GPUs, every schedule, against sums of float32 products; several ranks share a GPU where there
// are fewer, so that sums of more than two partial results are tested anywhere.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/cuda/channel.h"
#include "csrc/core/fp8.h"
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
        for (int i = 0; i < 5; ++i) Require(RunOnStreams(calls[r], group.rank(r), stream));
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
    EXPECT_EQ(static_cast<int>(RunOnStreams(calls[0], group->rank(0), nullptr).code), static_cast<int>(gemm::Status::kOk));
    CUDA_OK(cudaDeviceSynchronize());
    const auto* record = group->rank(0).record();
    EXPECT_EQ(record->failed, 1u);
    EXPECT_EQ(record->source, 1);
    EXPECT_EQ(record->epoch, 1u);
    int nans = 0;
    const auto out = ToHost<uint16_t>(operands[0].gemm.out, OutElements(shape, 2));
    for (const uint16_t bits : out) nans += std::isnan(FromBF16(bits));
    EXPECT_EQ(nans, static_cast<int>(scatter ? out.size() : out.size() / 2));  // of a gather: the peer's rows
    const gemm::Status refused = RunOnStreams(calls[0], group->rank(0), nullptr);
    EXPECT(refused.code == gemm::Status::kInternal);
    EXPECT_CONTAINS(refused.message, "rank 0 waited");
  }
}

std::vector<float> Floats(const void* device, size_t count) {
  const auto bits = ToHost<uint16_t>(device, count);
  std::vector<float> floats(count);
  std::transform(bits.begin(), bits.end(), floats.begin(), FromBF16);
  return floats;
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    difference += std::isfinite(d) ? d * d : 1e30;
    norm += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(difference / norm);
}

void RunOnce(DeviceGroup& group, const std::vector<CollectiveGemm>& calls) {
  WarmUp(group, calls);
  OnAllRanks(group, [&](int r, cudaStream_t stream) { Require(RunOnStreams(calls[r], group.rank(r), stream)); });
}

// Against the same call with a bfloat16 result: E4M3 rounds to 3 bits behind the first, 1.9e-2 of random values.
TEST(FP8ResultsAndAmax) {
  for (const int t : {2, 3}) {
    for (const bool scatter : {true, false}) {
      const Shape shape{scatter, 400 * t, 256 * t, 512 * t};
      const auto group = MakeGroup(t, size_t{16} << 20);
      const auto operands = OperandsOf(shape, *group);
      const size_t count = OutElements(shape, t);
      std::vector<CollectiveGemm> calls;
      for (int r = 0; r < t; ++r) calls.push_back(CallOf(shape, {2, false, false}, t, operands[r]));
      RunOnce(*group, calls);
      std::vector<std::vector<float>> want;
      float largest = 0;
      for (int r = 0; r < t; ++r) {
        want.push_back(Floats(calls[r].gemm.out, count));
        for (const float value : want.back()) largest = std::max(largest, std::abs(value));
      }
      const float scale = 400.0f / largest;
      for (int r = 0; r < t; ++r) {
        CUDA_OK(cudaSetDevice(group->rank(r).device()));
        auto* scalars = Allocate<float>(512);
        CUDA_OK(cudaMemcpy(scalars, &scale, sizeof(float), cudaMemcpyHostToDevice));
        calls[r].gemm.out_dtype = DType::kE4M3;
        calls[r].gemm.out = Allocate(count);
        calls[r].gemm.out_scale = scalars;
        calls[r].gemm.amax = scalars + 64;
        calls[r].problem.sum = true;
      }
      RunOnce(*group, calls);
      for (int r = 0; r < t; ++r) {
        const auto codes = ToHost<uint8_t>(calls[r].gemm.out, count);
        std::vector<float> got(count);
        std::transform(codes.begin(), codes.end(), got.begin(),
                       [&](uint8_t code) { return TableOf(DType::kE4M3)[code] / scale; });
        const double error = RelativeError(got, want[r]);
        EXPECT(error < 4e-2);
        float rank_largest = 0;
        for (const float value : want[r]) rank_largest = std::max(rank_largest, std::abs(value));
        const float amax = ToHost<float>(calls[r].gemm.amax, 1)[0];
        EXPECT(std::abs(amax - rank_largest) <= 0.005f * rank_largest);
        if (r == 0) std::printf("  %s to FP8, %d ranks: error %.2e\n", scatter ? "rs" : "ag", t, error);
      }
    }
  }
}

// Copies runs of rows so that those of a block, one in each of `batch` parts, are one piece; or back.
void* Regrouped(const void* from, int t, int batch, int64_t run, size_t row, bool back) {
  auto* to = static_cast<char*>(Allocate(static_cast<size_t>(t * batch * run) * row));
  for (int block = 0; block < t; ++block) {
    for (int part = 0; part < batch; ++part) {
      size_t apart = static_cast<size_t>((part * t + block) * run) * row;
      size_t together = static_cast<size_t>((block * batch + part) * run) * row;
      if (back) std::swap(apart, together);
      CUDA_OK(cudaMemcpy(to + together, static_cast<const char*>(from) + apart, static_cast<size_t>(run) * row,
                         cudaMemcpyDeviceToDevice));
    }
  }
  return to;
}

// Blocks that are several runs of rows, as a batch dimension makes them: the same as the rows in another order.
TEST(Batches) {
  constexpr int kBatch = 3, kRanks = 2;
  constexpr int64_t kRun = 80;
  for (const bool scatter : {true, false}) {
    const Shape shape{scatter, kRanks * kBatch * kRun, 512, 512};
    const auto group = MakeGroup(kRanks, size_t{16} << 20);
    auto operands = OperandsOf(shape, *group);
    std::vector<CollectiveGemm> calls;
    for (int r = 0; r < kRanks; ++r) {
      calls.push_back(CallOf(shape, {2, false, !scatter}, kRanks, operands[r]));
      calls[r].batch = kBatch;
    }
    RunOnce(*group, calls);
    const auto row = static_cast<size_t>(calls[0].gemm.n) * 2, lhs_row = static_cast<size_t>(calls[0].gemm.k);
    std::vector<std::vector<float>> got;
    std::vector<std::vector<uint8_t>> kept;
    const size_t count = OutElements(shape, kRanks);
    for (int r = 0; r < kRanks; ++r) {
      CUDA_OK(cudaSetDevice(group->rank(r).device()));
      const void* out = calls[r].gemm.out;
      got.push_back(Floats(scatter ? out : Regrouped(out, kRanks, kBatch, kRun, row, false), count));
      if (scatter) {
        calls[r].gemm.lhs = Regrouped(calls[r].gemm.lhs, kRanks, kBatch, kRun, lhs_row, false);
      } else {
        const void* grouped = Regrouped(calls[r].kept, kRanks, kBatch, kRun, lhs_row, false);
        kept.push_back(ToHost<uint8_t>(grouped, static_cast<size_t>(shape.m) * lhs_row));
      }
      calls[r].batch = 1;
    }
    RunOnce(*group, calls);
    for (int r = 0; r < kRanks; ++r) {
      EXPECT(RelativeError(got[r], Floats(calls[r].gemm.out, count)) < 1e-3);
      if (!scatter) EXPECT(kept[r] == ToHost<uint8_t>(calls[r].kept, kept[r].size()));
      if (!scatter) EXPECT_EQ(ToHost<float>(calls[r].kept_scale_inv, 2)[1], 1.0f / 256);
    }
  }
}

// Back to back, each with a shape, a kind and a schedule of its own, into results that were NaN; every element of every
// result is looked at. Ranks are at their own pace: now and then one rests.
TEST(TenThousandCalls) {
  constexpr int kKinds = 24, kRounds = 100, kCallsARound = 50;
  for (const int t : {2, 3}) {
    const auto group = MakeGroup(t, size_t{4} << 20);
    std::minstd_rand random(17);
    const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % (high - low + 1)); };
    struct Kind {
      Shape shape;
      std::vector<CollectiveGemm> calls;            // by rank
      std::vector<std::vector<uint16_t>> expected;  // by rank
    };
    std::vector<Kind> kinds;
    for (int i = 0; i < kKinds; ++i) {
      Kind kind;
      kind.shape = {i % 2 == 0, t * pick(1, 300), t * 16 * pick(2, 20), t * 16 * pick(1, 20)};
      const auto operands = OperandsOf(kind.shape, *group);
      const bool direct = kind.shape.scatter && i % 4 == 0, keep = !kind.shape.scatter && i % 4 == 1;
      const Schedule schedule{static_cast<int>(pick(1, 4)), direct, keep};
      for (int r = 0; r < t; ++r) {
        kind.calls.push_back(CallOf(kind.shape, schedule, t, operands[r]));
        kind.calls[r].problem.granularity = 16;
      }
      RunOnce(*group, kind.calls);
      EXPECT(Compare(kind.shape, operands, *group).frobenius < 2.5e-3);  // of few elements, some of them
      for (int r = 0; r < t; ++r) {
        kind.expected.push_back(ToHost<uint16_t>(kind.calls[r].gemm.out, OutElements(kind.shape, t)));
      }
      kinds.push_back(std::move(kind));
    }
    std::vector<int> order(static_cast<size_t>(kRounds * kCallsARound));
    for (int& each : order) each = static_cast<int>(pick(0, kKinds - 1));
    std::vector<long> wrong(t);
    OnAllRanks(*group, [&](int r, cudaStream_t stream) {
      std::minstd_rand pace(static_cast<unsigned>(r + 1));
      std::vector<void*> outs;
      size_t largest = 0;
      for (const Kind& kind : kinds) largest = std::max(largest, kind.expected[r].size() * sizeof(uint16_t));
      for (int i = 0; i < kCallsARound; ++i) outs.push_back(Allocate(largest));
      for (int round = 0; round < kRounds; ++round) {
        for (void* out : outs) CUDA_OK(cudaMemsetAsync(out, 0xff, largest, stream));
        for (int i = 0; i < kCallsARound; ++i) {
          CollectiveGemm call = kinds[order[round * kCallsARound + i]].calls[r];
          call.gemm.out = outs[i];
          if (pace() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pace() % 300));
          Require(RunOnStreams(call, group->rank(r), stream));
        }
        CUDA_OK(cudaStreamSynchronize(stream));
        for (int i = 0; i < kCallsARound; ++i) {
          const auto& expected = kinds[order[round * kCallsARound + i]].expected[r];
          const auto got = ToHost<uint16_t>(outs[i], expected.size());
          for (size_t j = 0; j < got.size(); ++j) wrong[r] += got[j] != expected[j];
        }
      }
    });
    for (int r = 0; r < t; ++r) EXPECT_EQ(wrong[r], 0l);
    std::printf("  %d calls, %d ranks\n", kRounds * kCallsARound, t);
  }
}

std::string TextOf(const std::optional<ChannelError>& error) { return error.has_value() ? error->message : ""; }

// What a program's ranks do: meet, get memory, meet again for something larger, and refuse what differs.
TEST(ChannelsOfThreads) {
  constexpr int kRanks = 3;
  const Shape small{true, 64 * kRanks, 256 * kRanks, 128 * kRanks}, large{false, 512 * kRanks, 512, 256 * kRanks};
  const auto group = MakeGroup(kRanks, size_t{16} << 20);  // for operands and the comparison
  LocalBoard board;
  std::vector<std::unique_ptr<Channel>> channels;
  for (int r = 0; r < kRanks; ++r) {
    channels.push_back(std::make_unique<Channel>(board, "devices", r, kRanks, group->rank(r).device()));
  }
  for (const Shape& shape : {small, large, small}) {
    const auto operands = OperandsOf(shape, *group);
    OnAllRanks(*group, [&](int r, cudaStream_t stream) {
      const CollectiveGemm call = CallOf(shape, {2, false, false}, kRanks, operands[r]);
      const std::string why = TextOf(channels[r]->Prepare(call, stream));
      if (!why.empty()) std::fprintf(stderr, "%s\n", why.c_str());
      EXPECT(why.empty());
      for (int i = 0; i < 4; ++i) EXPECT(!channels[r]->Run(call, stream).has_value());
    });
    EXPECT(Compare(shape, operands, *group).frobenius < kTolerance);
  }
  EXPECT(channels[0]->self().slot_bytes() == size_t{512} * 512);
  const auto operands = OperandsOf(small, *group);
  std::vector<std::string> said(kRanks), later(kRanks);
  OnAllRanks(*group, [&](int r, cudaStream_t stream) {
    const CollectiveGemm call = CallOf(small, {r == 2 ? 1 : 2, false, false}, kRanks, operands[r]);
    said[r] = TextOf(channels[r]->Prepare(call, stream));
    later[r] = TextOf(channels[r]->Run(call, stream));
  });
  EXPECT_CONTAINS(said[0], "rank 0 of devices has matmul_reduce_scatter, blocks of 64 rows, k=256, n=384");
  EXPECT_CONTAINS(said[0], "2 pieces; rank 2 has");
  for (const std::string& each : later) EXPECT_CONTAINS(each, "has failed before: ");
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
