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

// [k blocks, M] scales of 1x128 blocks: some columns of them are copied together for a piece of a reduce-scatter.
TEST(ScalesOfBlocks) {
  Memory memory;
  CollectiveGemm call = CallOf(Collective::kMatmulReduceScatter, 1, memory);
  call.problem.block_rows = 264;
  call.problem.chunks = 2;
  call.problem.granularity = 128;
  call.gemm.k = 272;
  call.gemm.m = kRanks * 264;
  call.gemm.lhs_scaling = call.gemm.rhs_scaling = Scaling::kBlock1x128;
  std::vector<float> scales(static_cast<size_t>(3 * call.gemm.m));
  call.gemm.lhs_scale_inv = scales.data();
  memory.lhs.resize(static_cast<size_t>(call.gemm.m * call.gemm.k));
  call.gemm.lhs = memory.lhs.data();
  EXPECT(!WhyNot(call).has_value());
  EXPECT_EQ(SlotBytes(call), size_t{264 * kN * 2} + 3 * 264 * 4);  // the data are whole 256 bytes
  Addresses arena(1, SlotBytes(call));
  std::map<const char*, size_t> scratch;
  for (const Step& step : MakeSchedule(call.problem, 1, 1)) {
    if (step.action != Action::kMultiply) continue;
    const auto copy = ScalesOf(call, step, arena);
    const auto products = ProductsOf(call, 1, step, arena);
    EXPECT(copy.has_value());
    EXPECT_EQ(products.size(), size_t{1});
    const int64_t first = step.from.block * 264 + step.from.rows.begin;
    EXPECT(copy->from == scales.data() + first);
    EXPECT(copy->to == products[0].lhs_scale_inv);
    EXPECT_EQ(copy->rows, size_t{3});
    EXPECT_EQ(copy->bytes, static_cast<size_t>(products[0].m) * 4);
    EXPECT_EQ(copy->to_pitch, copy->bytes);
    EXPECT_EQ(copy->from_pitch, static_cast<size_t>(call.gemm.m) * 4);
    scratch[static_cast<char*>(copy->to)] = copy->rows * copy->bytes;
    // Not in what the product writes, nor in what is pushed while it is written.
    const auto* out = static_cast<const char*>(products[0].out);
    if (step.to.place == Place::kStaging || step.to.place == Place::kPartial) {
      const int64_t width = step.to.place == Place::kPartial ? 4 : 2;
      EXPECT(static_cast<char*>(copy->to) >= out + products[0].m * kN * width);
    }
  }
  EXPECT_EQ(scratch.size(), size_t{5});  // two peers' blocks in two pieces each, the own one whole
  const char* end = nullptr;
  for (const auto& [begin, bytes] : scratch) {
    EXPECT(begin >= end);
    end = begin + bytes;
  }
}

TEST(ScalesOfBlocksThatAreGathered) {
  Memory memory;
  CollectiveGemm call = CallOf(Collective::kAllGatherMatmul, 1, memory);
  call.problem.block_rows = 8;
  call.problem.chunks = 1;
  call.gemm.k = 272;
  call.gemm.lhs_scaling = call.gemm.rhs_scaling = Scaling::kBlock1x128;
  std::vector<float> scales(3 * 8), kept(3 * 8 * kRanks);
  std::vector<char> data(8 * 272), all(8 * 272 * kRanks);
  call.gemm.lhs = data.data();
  call.gemm.lhs_scale_inv = scales.data();
  call.kept = all.data();
  call.kept_scale_inv = kept.data();
  Addresses arena(1, SlotBytes(call));
  for (const Step& step : MakeSchedule(call.problem, 1, 1)) {
    if (step.action == Action::kMultiply) {
      EXPECT(!ScalesOf(call, step, arena).has_value());
      const float* found = ProductsOf(call, 1, step, arena)[0].lhs_scale_inv;
      const bool own = step.from.place == Place::kOperand;
      const char* behind = own ? nullptr : arena.Slot(1, step.from.block, step.from.parity) + 2304;  // 8 * 272, rounded
      EXPECT(own ? found == scales.data() : reinterpret_cast<const char*>(found) == behind);
    } else if (step.action == Action::kPush) {
      const auto transfers = TransfersOf(call, 1, step, arena);
      EXPECT(transfers[0].to == arena.Slot(step.to.owner, 1, step.to.parity) + 2304);
      EXPECT(transfers[0].from == scales.data());
      EXPECT_EQ(transfers[0].bytes, size_t{3 * 8 * 4});
    } else if (step.action == Action::kKeep) {
      const Transfer copy = TransfersOf(call, 1, step, arena)[0];
      EXPECT(copy.to == kept.data() + step.from.block * 8);
      EXPECT_EQ(copy.rows, size_t{3});
      EXPECT_EQ(copy.to_pitch, size_t{kRanks * 8 * 4});
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
