#include "csrc/ffi/state.h"

#include <string>

#include "csrc/core/state.h"
#include "csrc/ffi/check.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

// The leaves of as many quantizers as `formats` (words, one blank between them) names.
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

  const auto quantizers = static_cast<int64_t>(out.formats.size());
  const Array history = operands.Arg("amax_history", {DType::kF32});
  if (operands.ok()) {
    const bool ok = history.shape.size() == 2 && history.shape[0] == quantizers && history.shape[1] > 0;
    operands.Expect(ok, "amax_history shape", "[" + std::to_string(quantizers) + ", at least 1]",
                    ToString(history.shape));
  }
  if (operands.ok()) out.history_len = history.shape[1];
  out.amax_history = static_cast<const float*>(history.data);
  out.scale = operands.ArgOf<float>("scale", DType::kF32, {quantizers});
  out.uses = operands.ArgOf<float>("uses", DType::kF32, {quantizers, state::kUses});
  return out;
}

}  // namespace

ffi::ErrorOr<ScaleReadArgs> DecodeScaleRead(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                            const ScaleReadSpec& spec) {
  Operands operands("scale_read", args, rets);
  ScaleReadArgs out;
  out.leaves = DecodeLeaves(operands, spec);
  for (size_t i = 0; i < out.leaves.formats.size(); ++i) {
    out.scales.push_back(operands.RetOf<float>("scale", DType::kF32, {}));
  }
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

ffi::ErrorOr<ScaleWriteArgs> DecodeScaleWrite(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                              const ScaleWriteSpec& spec) {
  Operands operands("scale_write", args, rets);
  ScaleWriteArgs out;
  out.leaves = DecodeLeaves(operands, spec);
  const size_t quantizers = out.leaves.formats.size();
  const bool ok = spec.used.size() == quantizers && spec.used.find_first_not_of("01") == std::string_view::npos;
  operands.Expect(ok, "used", "0 or 1 for each of " + std::to_string(quantizers) + " quantizers", spec.used);
  out.amaxes.resize(quantizers);
  for (size_t i = 0; i < quantizers && operands.ok(); ++i) {
    if (spec.used[i] == '1') out.amaxes[i] = operands.ArgOf<float>("amax", DType::kF32, {});
  }
  const auto q = static_cast<int64_t>(quantizers);
  out.amax_history = operands.RetOf<float>("amax_history", DType::kF32, {q, out.leaves.history_len});
  out.scale = operands.RetOf<float>("scale", DType::kF32, {q});
  out.uses = operands.RetOf<float>("uses", DType::kF32, {q, state::kUses});
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
