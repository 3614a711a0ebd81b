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

}  // namespace

DType TravellingDType(const GemmArgs& gemm) { return IsFP8(gemm.out_dtype) ? DType::kBF16 : gemm.out_dtype; }

size_t SlotBytes(const CollectiveGemm& call) {
  const GemmArgs& gemm = call.gemm;
  const int64_t row = call.problem.collective == Collective::kAllGatherMatmul
                          ? gemm.k * SizeOf(gemm.lhs_dtype)
                          : gemm.n * SizeOf(TravellingDType(gemm));
  return static_cast<size_t>(call.problem.block_rows * row);
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
    if (step.from.place == Place::kSlot && IsFP8(args.lhs_dtype)) {
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
    const float* own = call.gemm.lhs_scale_inv;
    if (step.action == Action::kPush) {
      transfers.push_back({arena.SlotScale(step.to.owner, rank, step.to.parity), own, sizeof(float)});
    } else {
      const int source = step.from.block;
      const bool arrived = step.from.place == Place::kSlot;
      transfers.push_back({call.kept_scale_inv + source,
                           arrived ? arena.SlotScale(rank, source, step.from.parity) : own, sizeof(float)});
    }
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
