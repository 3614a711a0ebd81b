#include "csrc/comm/operands.h"

#include <algorithm>

#include "csrc/core/dtype.h"
#include "csrc/core/fp8.h"

namespace te_jax::comm {
namespace {

// Addresses of areas, row by row.
class Places {
 public:
  Places(const CollectiveGemm& call, Arena& arena) : call_(call), arena_(arena) {}

  bool gathers() const { return call_.problem.collective == Collective::kAllGatherMatmul; }
  size_t lhs_row() const { return static_cast<size_t>(call_.gemm.k * SizeOf(call_.gemm.lhs_dtype)); }
  size_t out_row() const { return static_cast<size_t>(call_.gemm.n * SizeOf(call_.gemm.out_dtype)); }
  size_t partial_row() const { return static_cast<size_t>(call_.gemm.n * SizeOf(TravellingDType(call_.gemm))); }
  size_t slot_row() const { return gathers() ? lhs_row() : partial_row(); }

  // Whether the area is all ranks' rows, so that a block of it is `batch` runs.
  bool HasAllBlocks(const Area& area) const {
    if (area.place == Place::kKept) return true;
    return area.place == (gathers() ? Place::kResult : Place::kOperand);
  }

  char* At(const Area& area, int64_t row) const {
    const auto in_block = static_cast<size_t>(row), in_all = static_cast<size_t>(RowOfAll(area.block, row));
    const auto offset = [](const void* base, size_t bytes) {
      return static_cast<char*>(const_cast<void*>(base)) + bytes;
    };
    switch (area.place) {
      case Place::kOperand: return offset(call_.gemm.lhs, (gathers() ? in_block : in_all) * lhs_row());
      case Place::kStaging: return arena_.Staging(area.block) + in_block * partial_row();
      case Place::kSlot: return arena_.Slot(area.owner, area.block, area.parity) + in_block * slot_row();
      case Place::kPartial: return arena_.Partial() + in_block * static_cast<size_t>(call_.gemm.n) * sizeof(float);
      case Place::kResult: return offset(call_.gemm.out, (gathers() ? in_all : in_block) * out_row());
      case Place::kKept: return offset(call_.kept, in_all * lhs_row());
    }
    return nullptr;
  }

  // The runs of rows that are in one piece in both areas.
  std::vector<Rows> Runs(const Area& a, const Area& b) const {
    const Rows rows = a.rows;
    const int64_t run = call_.problem.block_rows / call_.batch;
    if (call_.batch == 1 || !(HasAllBlocks(a) || HasAllBlocks(b))) return {rows};
    std::vector<Rows> runs;
    for (int64_t begin = rows.begin; begin < rows.end;) {
      const int64_t end = std::min((begin / run + 1) * run, rows.end);
      runs.push_back({begin, end});
      begin = end;
    }
    return runs;
  }

 private:
  int64_t RowOfAll(int block, int64_t row) const {
    const int64_t run = call_.problem.block_rows / call_.batch;
    return (row / run * call_.problem.ranks + block) * run + row % run;
  }

  const CollectiveGemm& call_;
  Arena& arena_;
};

size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

bool InBlocks(const CollectiveGemm& call) { return call.gemm.lhs_scaling != Scaling::kTensor; }

size_t DataBytes(const CollectiveGemm& call) {
  const GemmArgs& gemm = call.gemm;
  const int64_t row = call.problem.collective == Collective::kAllGatherMatmul
                          ? gemm.k * SizeOf(gemm.lhs_dtype)
                          : gemm.n * SizeOf(TravellingDType(gemm));
  return static_cast<size_t>(call.problem.block_rows * row);
}

// [k blocks, rows], of a block or of a piece.
size_t ScaleBytes(const CollectiveGemm& call, int64_t rows) {
  return static_cast<size_t>(NumBlocks(call.gemm.k) * rows) * sizeof(float);
}

// The scales of the rows of a kMultiply step.
const float* BlockScalesOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena) {
  if (call.problem.collective == Collective::kAllGatherMatmul) {
    if (step.from.place == Place::kOperand) return call.gemm.lhs_scale_inv;
    return reinterpret_cast<float*>(arena.Slot(rank, step.from.block, step.from.parity) + RoundUp(DataBytes(call)));
  }
  // Scratch behind what is on its way, or behind the own partial result.
  const bool travels = step.to.place == Place::kSlot || step.to.place == Place::kStaging;
  const auto partial = static_cast<size_t>(call.problem.block_rows * call.gemm.n) * sizeof(float);
  char* scratch = travels ? arena.Staging(step.from.block) + RoundUp(DataBytes(call)) : arena.Partial() + RoundUp(partial);
  return reinterpret_cast<float*>(scratch + ScaleBytes(call, step.from.rows.begin));
}

// The scale of a block, to a peer or to the gathered ones.
Transfer ScaleTransfer(const CollectiveGemm& call, int rank, const Step& step, Arena& arena) {
  const float* own = call.gemm.lhs_scale_inv;
  if (step.action == Action::kPush) return {arena.SlotScale(step.to.owner, rank, step.to.parity), own, sizeof(float)};
  const int source = step.from.block;
  const bool arrived = step.from.place == Place::kSlot;
  return {call.kept_scale_inv + source, arrived ? arena.SlotScale(rank, source, step.from.parity) : own, sizeof(float)};
}

// The same of the scales of its blocks of 128, [k blocks, rows]: all of them, or some of the columns of the gathered ones.
Transfer BlockScaleTransfer(const CollectiveGemm& call, int rank, const Step& step, Arena& arena) {
  const int64_t rows = call.problem.block_rows;
  Transfer copy;
  copy.from = BlockScalesOf(call, rank, step, arena);
  copy.bytes = ScaleBytes(call, rows);
  if (step.action == Action::kPush) {
    copy.to = arena.Slot(step.to.owner, rank, step.to.parity) + RoundUp(DataBytes(call));
    return copy;
  }
  copy.to = call.kept_scale_inv + step.from.block * rows;
  copy.rows = static_cast<size_t>(NumBlocks(call.gemm.k));
  copy.bytes = copy.from_pitch = static_cast<size_t>(rows) * sizeof(float);
  copy.to_pitch = copy.bytes * static_cast<size_t>(call.problem.ranks);
  return copy;
}

}  // namespace

std::optional<std::string> WhyNot(const CollectiveGemm& call) {
  if (auto why = WhyNot(call.problem)) return why;
  if (!InBlocks(call)) return std::nullopt;
  if (call.gemm.lhs_scaling != Scaling::kBlock1x128) return "lhs_scaling: expected block_1x128, got block_128x128";
  if (call.batch != 1) return "lhs: expected no batch dimension in blocks, got a batch of " + std::to_string(call.batch);
  const bool gathers = call.problem.collective == Collective::kAllGatherMatmul;
  if (gathers && call.problem.chunks != 1) return "chunks: expected 1 for all_gather_matmul in blocks";
  if (call.problem.block_rows % 8 != 0 || call.problem.granularity % 8 != 0) {
    return "rows of a rank's block: expected a multiple of 8 in blocks, got " + std::to_string(call.problem.block_rows);
  }
  return std::nullopt;
}

DType TravellingDType(const GemmArgs& gemm) { return IsFP8(gemm.out_dtype) ? DType::kBF16 : gemm.out_dtype; }

size_t SlotBytes(const CollectiveGemm& call) {
  if (!InBlocks(call)) return DataBytes(call);
  return RoundUp(DataBytes(call)) + ScaleBytes(call, call.problem.block_rows);
}

std::optional<Transfer> ScalesOf(const CollectiveGemm& call, const Step& step, Arena& arena) {
  if (!InBlocks(call) || call.problem.collective == Collective::kAllGatherMatmul) return std::nullopt;
  const int64_t rows = step.from.rows.end - step.from.rows.begin;
  const int64_t first = step.from.block * call.problem.block_rows + step.from.rows.begin;
  Transfer copy;
  copy.to = const_cast<float*>(BlockScalesOf(call, step.from.owner, step, arena));
  copy.from = call.gemm.lhs_scale_inv + first;
  copy.bytes = copy.to_pitch = static_cast<size_t>(rows) * sizeof(float);
  copy.from_pitch = static_cast<size_t>(call.gemm.m) * sizeof(float);
  copy.rows = static_cast<size_t>(NumBlocks(call.gemm.k));
  return copy;
}

std::vector<GemmArgs> ProductsOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena) {
  const Places places(call, arena);
  std::vector<GemmArgs> products;
  for (const Rows& rows : places.Runs(step.from, step.to)) {
    GemmArgs args = call.gemm;
    args.m = rows.end - rows.begin;
    args.lhs = places.At(step.from, rows.begin);
    args.out = places.At(step.to, rows.begin);
    if (step.to.place != Place::kResult) {
      args.out_dtype = args.c_dtype = step.to.place == Place::kPartial ? DType::kF32 : TravellingDType(call.gemm);
      args.bias = nullptr;
      args.out_scale = nullptr;
      args.amax = nullptr;
    }
    if (step.with.has_value()) {
      args.c = places.At(*step.with, rows.begin);
      args.c_dtype = TravellingDType(call.gemm);
      args.beta = 1.0f;
    }
    if (InBlocks(call)) {
      args.lhs_scale_inv = BlockScalesOf(call, rank, step, arena);
    } else if (step.from.place == Place::kSlot && IsFP8(args.lhs_dtype)) {
      args.lhs_scale_inv = arena.SlotScale(rank, step.from.block, step.from.parity);
    }
    products.push_back(args);
  }
  return products;
}

std::vector<Transfer> TransfersOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena) {
  const Places places(call, arena);
  const size_t row = places.slot_row();
  std::vector<Transfer> transfers;
  if (places.gathers() && step.from.rows.begin == 0 && IsFP8(call.gemm.lhs_dtype)) {
    transfers.push_back(InBlocks(call) ? BlockScaleTransfer(call, rank, step, arena)
                                       : ScaleTransfer(call, rank, step, arena));
  }
  for (const Rows& rows : places.Runs(step.from, step.to)) {
    const auto count = static_cast<size_t>(rows.end - rows.begin);
    transfers.push_back({places.At(step.to, rows.begin), places.At(step.from, rows.begin), count * row});
  }
  return transfers;
}

SumPartialsArgs SumOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena) {
  const Places places(call, arena);
  const int64_t first = step.to.rows.begin;
  SumPartialsArgs args;
  args.rows = step.to.rows.end - first;
  args.cols = call.gemm.n;
  args.ranks = call.problem.ranks;
  args.own = rank;
  args.partial = reinterpret_cast<const float*>(places.At(step.from, first));
  for (int source = 0; source < args.ranks; ++source) {
    if (source == rank) continue;
    Area slot = *step.with;
    slot.block = source;
    args.slots[source] = places.At(slot, first);
  }
  args.slot_dtype = TravellingDType(call.gemm);
  args.bias = call.gemm.bias;
  args.bias_dtype = call.gemm.bias_dtype;
  args.out_dtype = call.gemm.out_dtype;
  args.out_scale = call.gemm.out_scale;
  args.out = places.At(step.to, first);
  args.amax = call.gemm.amax;
  return args;
}

Transfer ArrivalOf(const CollectiveGemm& call, const Step& step, Arena& arena) {
  const Places places(call, arena);
  const auto rows = static_cast<size_t>(step.from.rows.end - step.from.rows.begin);
  return {places.At(step.from, step.from.rows.begin), nullptr, rows * places.slot_row()};
}

}  // namespace te_jax::comm
