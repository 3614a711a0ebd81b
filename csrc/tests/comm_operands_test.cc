// The memory that the steps of a schedule are about: every row of every operand and result, once, at its place.
#include "csrc/comm/operands.h"

#include <cstring>
#include <map>

#include "csrc/comm/arena_layout.h"
#include "csrc/tests/check.h"

namespace te_jax::comm {
namespace {

constexpr int64_t kRun = 5, kN = 16, kK = 32;  // rows of a block in one run, columns of the result, contraction
constexpr int kRanks = 3;

// An arena in ordinary memory, of which only addresses are looked at.
class Addresses : public Arena {
 public:
  Addresses(int rank, size_t slot_bytes) : rank_(rank), layout_(kRanks, slot_bytes), bytes_(kRanks * layout_.Bytes()) {}
  char* Slot(int owner, int source, int parity) override { return At(owner) + layout_.Slot(owner, source, parity); }
  float* SlotScale(int owner, int source, int parity) override {
    return reinterpret_cast<float*>(At(owner) + layout_.SlotScale(owner, source, parity));
  }
  char* Staging(int owner) override { return At(rank_) + layout_.Staging(rank_, owner); }
  char* Partial() override { return At(rank_) + layout_.Partial(); }

 private:
  char* At(int owner) { return bytes_.data() + static_cast<size_t>(owner) * layout_.Bytes(); }
  const int rank_;
  const ArenaLayout layout_;
  std::vector<char> bytes_;
};

struct Memory {
  std::vector<char> lhs, out, kept;
  float lhs_scale = 1, kept_scales[kRanks] = {};
};

CollectiveGemm CallOf(Collective collective, int64_t batch, Memory& memory) {
  CollectiveGemm call;
  call.problem.collective = collective;
  call.problem.ranks = kRanks;
  call.problem.block_rows = batch * kRun;
  call.problem.chunks = 2;
  call.problem.granularity = 4;
  const bool gathers = collective == Collective::kAllGatherMatmul;
  call.problem.keep = gathers;
  call.batch = batch;
  call.gemm.n = kN;
  call.gemm.k = kK;
  call.gemm.m = call.problem.block_rows * (gathers ? 1 : kRanks);
  memory.lhs.resize(static_cast<size_t>(call.gemm.m * kK));
  memory.out.resize(static_cast<size_t>(call.problem.block_rows * (gathers ? kRanks : 1) * kN * 2));
  memory.kept.resize(static_cast<size_t>(call.problem.block_rows * kRanks * kK));
  call.gemm.lhs = memory.lhs.data();
  call.gemm.out = memory.out.data();
  call.gemm.lhs_scale_inv = &memory.lhs_scale;
  call.gemm.bias = &memory;
  call.kept = memory.kept.data();
  call.kept_scale_inv = memory.kept_scales;
  return call;
}

using Counts = std::map<int64_t, int>;

void Add(Counts& counts, const void* from, const std::vector<char>& memory, int64_t row_bytes, int64_t rows) {
  const int64_t offset = static_cast<const char*>(from) - memory.data();
  if (offset < 0 || offset >= static_cast<int64_t>(memory.size())) return;
  EXPECT_EQ(offset % row_bytes, 0);
  for (int64_t i = 0; i < rows; ++i) ++counts[offset / row_bytes + i];
}

bool Once(const Counts& counts, int64_t rows) {
  bool once = static_cast<int64_t>(counts.size()) == rows;
  for (const auto& [row, count] : counts) once = once && count == 1 && row < rows;
  return once;
}

TEST(EveryRowOnce) {
  for (const Collective collective : {Collective::kMatmulReduceScatter, Collective::kAllGatherMatmul}) {
    const bool gathers = collective == Collective::kAllGatherMatmul;
    for (const int64_t batch : {1, 4}) {
      for (int rank = 0; rank < kRanks; ++rank) {
        Memory memory;
        const CollectiveGemm call = CallOf(collective, batch, memory);
        Addresses arena(rank, SlotBytes(call));
        Counts read, written, kept;
        for (const Step& step : MakeSchedule(call.problem, rank, 1)) {
          if (step.action == Action::kMultiply) {
            for (const GemmArgs& args : ProductsOf(call, rank, step, arena)) {
              Add(read, args.lhs, memory.lhs, kK, args.m);
              Add(written, args.out, memory.out, kN * 2, args.m);
              EXPECT_EQ(args.bias != nullptr, gathers);  // of a sum: in its kernel
              if (step.from.place == Place::kSlot) EXPECT(args.lhs_scale_inv != &memory.lhs_scale);
            }
          } else if (step.action == Action::kReduce) {
            const SumPartialsArgs sum = SumOf(call, rank, step, arena);
            Add(written, sum.out, memory.out, kN * 2, sum.rows);
            EXPECT(sum.bias != nullptr);
            EXPECT(sum.slots[rank] == nullptr);
          } else if (step.action == Action::kKeep) {
            for (const Transfer& copy : TransfersOf(call, rank, step, arena)) {
              Add(kept, copy.to, memory.kept, kK, static_cast<int64_t>(copy.bytes) / kK);
            }
          }
        }
        EXPECT(Once(read, call.gemm.m));
        EXPECT(Once(written, call.problem.block_rows * (gathers ? kRanks : 1)));
        if (gathers) EXPECT(Once(kept, call.problem.block_rows * kRanks));
      }
    }
  }
}

// [batch, ranks, run] rows: block b of batch i starts at row (i * ranks + b) * run.
TEST(BlocksOfABatch) {
  Memory memory;
  const CollectiveGemm call = CallOf(Collective::kMatmulReduceScatter, 2, memory);
  Addresses arena(0, SlotBytes(call));
  Step step(Action::kMultiply);
  step.from = {Place::kOperand, 0, 1, {4, 8}, 0};  // the last row of its first run and three of the second
  step.to = {Place::kSlot, 1, 0, {4, 8}, 1};
  const auto products = ProductsOf(call, 0, step, arena);
  EXPECT_EQ(products.size(), size_t{2});
  EXPECT_EQ(products[0].m, 1);
  EXPECT_EQ(products[1].m, 3);
  const auto row_of = [&](const GemmArgs& args) { return (static_cast<const char*>(args.lhs) - memory.lhs.data()) / kK; };
  EXPECT_EQ(row_of(products[0]), 1 * kRun + 4);
  EXPECT_EQ(row_of(products[1]), (kRanks + 1) * kRun);
  EXPECT(static_cast<char*>(products[1].out) == arena.Slot(1, 0, 1) + 5 * kN * 2);  // one piece there
  EXPECT(products[0].bias == nullptr);
}

TEST(FP8ResultsTravelInBFloat16AndAreScaledOnce) {
  Memory memory;
  CollectiveGemm call = CallOf(Collective::kMatmulReduceScatter, 1, memory);
  float scale = 2, amax = 0;
  call.gemm.out_dtype = DType::kE4M3;
  call.gemm.out_scale = &scale;
  call.gemm.amax = &amax;
  EXPECT_EQ(SlotBytes(call), static_cast<size_t>(kRun * kN * 2));
  Addresses arena(0, SlotBytes(call));
  for (const Step& step : MakeSchedule(call.problem, 0, 1)) {
    if (step.action == Action::kMultiply) {
      for (const GemmArgs& args : ProductsOf(call, 0, step, arena)) {
        EXPECT(args.out_dtype == (step.to.place == Place::kPartial ? DType::kF32 : DType::kBF16));
        EXPECT(args.out_scale == nullptr);
        EXPECT(args.amax == nullptr);
      }
    } else if (step.action == Action::kReduce) {
      const SumPartialsArgs sum = SumOf(call, 0, step, arena);
      EXPECT(sum.out_scale == &scale);
      EXPECT(sum.amax == &amax);
    }
  }
}

// Everything in an arena has a place of its own.
TEST(PlacesInAnArena) {
  constexpr size_t kBytes = 1000, kRounded = 1024;
  for (const int ranks : {2, 3, 16}) {
    const ArenaLayout layout(ranks, kBytes);
    for (int rank = 0; rank < ranks; ++rank) {
      std::map<size_t, size_t> places = {{layout.Scratch(), ArenaLayout::kHead}, {layout.Partial(), 2 * kRounded}};
      for (int other = 0; other < ranks; ++other) {
        for (int chunk = 0; chunk < kMaxChunks; ++chunk) places[layout.Flag(other, chunk)] = ArenaLayout::kFlagStride;
        if (other == rank) continue;
        places[layout.Staging(rank, other)] = kRounded;
        for (const int parity : {0, 1}) {
          places[layout.SlotScale(rank, other, parity)] = ArenaLayout::kHead;
          places[layout.Slot(rank, other, parity)] = kRounded;
        }
      }
      EXPECT_EQ(places.size(), static_cast<size_t>(ranks * kMaxChunks + 2 + (ranks - 1) * 5));
      size_t end = 0;
      for (const auto& [begin, bytes] : places) {
        EXPECT(begin >= end);
        end = begin + bytes;
      }
      EXPECT(end <= layout.Bytes());
    }
  }
}

// te_jax/primitives/collective_schedule.py has the same formula.
TEST(BytesOfAnArena) {
  EXPECT_EQ(ArenaLayout(2, size_t{1} << 26).Bytes(), (size_t{5} << 26) + (size_t{2} << 20));
}

}  // namespace
}  // namespace te_jax::comm

int main() { return te_jax::testing::RunAll(); }
