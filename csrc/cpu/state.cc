#include "csrc/core/state.h"

#include <cmath>

#include "csrc/core/fp8.h"
#include "csrc/cpu/kernels.h"

namespace te_jax::cpu {
namespace {

// One quantizer's leaves, decoded.
struct Row {
  state::Uses uses;
  float newest;
  state::View view;
};

float LeafOf(const float* leaf, int64_t i) { return state::Flush(leaf[i]); }

Row Decode(const StateLeaves& leaves, int64_t q) {
  const float* history = leaves.amax_history + q * leaves.history_len;
  const float* slots = leaves.uses + q * state::kUses;

  state::Sums sums{0.0f, 0, true, 0.0f, 0.0f};
  float rungs[state::kRungs];
  for (int i = 0; i < state::kUses; ++i) {
    const float value = LeafOf(slots, i);
    sums.rounded = sums.rounded && state::IsBF16(value);
    if (i < state::kRungs) {
      rungs[i] = value;
      sums.populated += value != 0.0f;
    }
  }
  for (int half = state::kRungs / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) rungs[i] = state::Flush(rungs[i] + rungs[i + half]);
  }
  sums.with_amax = rungs[0];
  for (int64_t i = 1; i < leaves.history_len; ++i) {
    sums.highest = state::Max(sums.highest, LeafOf(history, i));
    sums.lowest = state::Min(sums.lowest, LeafOf(history, i));
  }

  Row row;
  row.uses = state::CountUses(sums.with_amax, LeafOf(slots, state::kNoAmax), LeafOf(history, 0));
  int32_t highest_rung = state::Rung(row.uses.mean);
  for (int i = 0; i < state::kRungs; ++i) {
    const int32_t rung = state::PossibleRung(i, LeafOf(slots, i), row.uses);
    highest_rung = rung > highest_rung ? rung : highest_rung;
  }
  row.newest = state::Newest(row.uses, sums.populated, highest_rung);
  row.view = state::Read(sums, row.uses, row.newest, leaves.history_len > 1 ? LeafOf(history, 1) : 0.0f,
                         LeafOf(leaves.scale, q), LeafOf(slots, state::kParity), FP8Max(leaves.formats[q]),
                         std::ldexp(1.0f, -leaves.margin), leaves.most_recent);
  return row;
}

}  // namespace

bool ScaleRead(const ScaleReadArgs& args) {
  for (size_t q = 0; q < args.scales.size(); ++q) *args.scales[q] = Decode(args.leaves, q).view.scale;
  return true;
}

bool ScaleWrite(const ScaleWriteArgs& args) {
  const int64_t length = args.leaves.history_len;
  for (size_t q = 0; q < args.amaxes.size(); ++q) {
    const float* history = args.leaves.amax_history + q * length;
    float* new_history = args.amax_history + q * length;
    float* new_uses = args.uses + q * state::kUses;
    if (args.amaxes[q] == nullptr) {
      for (int64_t i = 0; i < length; ++i) new_history[i] = 0.0f;
      for (int i = 0; i < state::kUses; ++i) new_uses[i] = 0.0f;
      args.scale[q] = 0.0f;
      continue;
    }
    const Row row = Decode(args.leaves, q);
    const float amax = state::UsableAmax(*args.amaxes[q]);
    new_history[0] = state::Encode(amax);
    for (int64_t i = 0; i + 1 < length; ++i) {
      const float shifted =
          state::Shifted(i, LeafOf(history, i), LeafOf(history, i + 1), row.uses, row.newest);
      new_history[i + 1] = state::Encode(shifted);
    }
    args.scale[q] = state::EncodeScale(row.view, amax, FP8Max(args.leaves.formats[q]), args.leaves.margin);
    for (int i = 0; i < state::kUses; ++i) new_uses[i] = state::EncodeUses(i, row.view, amax);
  }
  return true;
}

}  // namespace te_jax::cpu
