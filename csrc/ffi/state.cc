#include "csrc/ffi/state.h"

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/core/grouped_args.h"
#include "csrc/core/state.h"
#include "csrc/ffi/check.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

// The shape of a quantizer's scale and amax.
template <typename Spec>
Shape GroupShape(const Spec& spec) {
  return spec.groups > 0 ? Shape{spec.groups} : Shape{};
}

// The dimensions of the leaves that count quantizers.
template <typename Spec>
Shape LeadOf(const Spec& spec, size_t quantizers) {
  Shape lead = GroupShape(spec);
  lead.push_back(static_cast<int64_t>(quantizers));
  return lead;
}

Shape With(Shape lead, int64_t last) {
  lead.push_back(last);
  return lead;
}

// The leaves of as many quantizers as `formats` (words, one blank between them) names. With groups every quantizer has
// a row for each of them, group by group: [groups, Q, ..].
template <typename Spec>
StateLeaves DecodeLeaves(Operands& operands, const Spec& spec) {
  StateLeaves out;
  std::string_view rest = spec.formats;
  bool known = !rest.empty();
  while (known && !rest.empty()) {
    const size_t end = rest.find(' ');
    out.formats.emplace_back();
    known = ParseFormat(rest.substr(0, end), &out.formats.back());
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  }
  operands.Expect(known, "formats", "\"e4m3\" or \"e5m2\" for each quantizer", spec.formats);
  operands.Expect(spec.margin >= -64 && spec.margin <= 64, "margin", "-64 to 64", std::to_string(spec.margin));
  out.margin = static_cast<int32_t>(spec.margin);
  out.most_recent = spec.most_recent;

  operands.Expect(spec.groups >= 0 && spec.groups <= kMaxGroups, "groups", "0 to " + std::to_string(kMaxGroups),
                  std::to_string(spec.groups));
  if (!operands.ok()) return out;
  const Shape lead = LeadOf(spec, out.formats.size());
  const Array history = operands.Arg("amax_history", {DType::kF32});
  if (operands.ok()) {
    Shape wanted = lead;
    wanted.push_back(history.shape.empty() ? 1 : std::max<int64_t>(history.shape.back(), 1));
    const std::string known = ToString(lead);
    operands.Expect(history.shape == wanted, "amax_history shape", known.substr(0, known.size() - 1) + ", at least 1]",
                    ToString(history.shape));
  }
  if (operands.ok()) out.history_len = history.shape.back();
  out.amax_history = static_cast<const float*>(history.data);
  out.scale = operands.ArgOf<float>("scale", DType::kF32, lead);
  out.uses = operands.ArgOf<float>("uses", DType::kF32, With(lead, state::kUses));
  const std::vector<DType> of_group = out.formats;
  for (int64_t g = 1; g < spec.groups; ++g) out.formats.insert(out.formats.end(), of_group.begin(), of_group.end());
  return out;
}

// Row (group, quantizer) of `arrays` [groups] or [], of which each quantizer has one.
template <typename T>
std::vector<T*> ByRow(const std::vector<T*>& arrays, int64_t groups) {
  std::vector<T*> rows;
  for (int64_t g = 0; g < std::max<int64_t>(groups, 1); ++g) {
    for (T* array : arrays) rows.push_back(array == nullptr ? nullptr : array + g);
  }
  return rows;
}

}  // namespace

ffi::ErrorOr<ScaleReadArgs> DecodeScaleRead(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                            const ScaleReadSpec& spec) {
  Operands operands("scale_read", args, rets);
  ScaleReadArgs out;
  out.leaves = DecodeLeaves(operands, spec);
  const size_t quantizers = out.leaves.formats.size() / static_cast<size_t>(std::max<int64_t>(spec.groups, 1));
  std::vector<float*> scales;
  for (size_t i = 0; i < quantizers && operands.ok(); ++i) {
    scales.push_back(operands.RetOf<float>("scale", DType::kF32, GroupShape(spec)));
  }
  out.scales = ByRow(scales, spec.groups);
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

ffi::ErrorOr<ScaleWriteArgs> DecodeScaleWrite(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                              const ScaleWriteSpec& spec) {
  Operands operands("scale_write", args, rets);
  ScaleWriteArgs out;
  out.leaves = DecodeLeaves(operands, spec);
  const size_t quantizers = out.leaves.formats.size() / static_cast<size_t>(std::max<int64_t>(spec.groups, 1));
  const bool ok = spec.used.size() == quantizers && spec.used.find_first_not_of("01") == std::string_view::npos;
  operands.Expect(ok, "used", "0 or 1 for each of " + std::to_string(quantizers) + " quantizers", spec.used);
  std::vector<const float*> amaxes(quantizers);
  for (size_t i = 0; i < quantizers && operands.ok(); ++i) {
    if (spec.used[i] == '1') amaxes[i] = operands.ArgOf<float>("amax", DType::kF32, GroupShape(spec));
  }
  out.amaxes = ByRow(amaxes, spec.groups);
  const Shape lead = LeadOf(spec, quantizers);
  out.amax_history = operands.RetOf<float>("amax_history", DType::kF32, With(lead, out.leaves.history_len));
  out.scale = operands.RetOf<float>("scale", DType::kF32, lead);
  out.uses = operands.RetOf<float>("uses", DType::kF32, With(lead, state::kUses));
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
