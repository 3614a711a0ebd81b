// Operands of what has groups, decoded from hand-made call frames.
#include "csrc/core/grouped_args.h"
#include "csrc/ffi/grouped_gemm.h"
#include "csrc/ffi/quantize.h"
#include "csrc/ffi/state.h"
#include "csrc/tests/check.h"
#include "csrc/tests/frame.h"

namespace te_jax {
namespace {

QuantizeSpec ByGroup(std::string_view scaling) {
  QuantizeSpec spec{};
  spec.format = "e4m3";
  spec.data = spec.data_t = spec.amax = true;
  spec.scaling = scaling;
  spec.groups = 3;
  return spec;
}

std::string QuantizeError(const std::vector<Spec>& args, const std::vector<Spec>& rets, const QuantizeSpec& spec) {
  const Frame frame(args, rets);
  const auto decoded = DecodeQuantize(frame.args(), frame.rets(), spec);
  return decoded.has_error() ? decoded.error().message() : "";
}

TEST(QuantizeByGroup) {
  const std::vector<Spec> rets = {{E4M3, {37, 32}}, {E4M3, {32, 48}}, {F32, {3}}, {F32, {3}}, {F32, {3}}};
  const Frame frame({{BF16, {37, 32}}, {S32, {3}}, {F32, {3}}}, rets);
  const auto args = DecodeQuantize(frame.args(), frame.rets(), ByGroup("group"));
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT(args->rows == 37 && args->cols == 32 && args->out.groups == 3);
  EXPECT(args->out.group_sizes == frame.arg(1) && args->out.scale == frame.arg(2));
  EXPECT(args->out.data == frame.ret(0) && args->out.data_t == frame.ret(1) && args->out.scale_used == frame.ret(2));
  EXPECT(args->out.scale_inv == frame.ret(3) && args->out.amax == frame.ret(4) && args->out.dbias == nullptr);

  EXPECT_CONTAINS(QuantizeError({{BF16, {37, 32}}, {F32, {3}}, {F32, {3}}}, rets, ByGroup("group")),
                  "te_jax quantize: group_sizes dtype: expected int32, got XLA type");
  EXPECT_CONTAINS(QuantizeError({{BF16, {37, 32}}, {S32, {4}}, {F32, {3}}}, rets, ByGroup("group")),
                  "te_jax quantize: group_sizes shape: expected [3], got [4]");
  EXPECT_CONTAINS(QuantizeError({{BF16, {1, 37, 32}}, {S32, {3}}, {F32, {3}}}, rets, ByGroup("group")),
                  "rank: expected 2 in group, got 3");
  QuantizeSpec many = ByGroup("group");
  many.groups = kMaxGroups + 1;
  EXPECT_CONTAINS(QuantizeError({{BF16, {37, 32}}, {S32, {1025}}, {F32, {1025}}}, rets, many),
                  "groups: expected 1 to 1024, got 1025");
}

TEST(QuantizeLeading) {
  const std::vector<Spec> rets = {{E4M3, {3, 16, 32}}, {E4M3, {3, 32, 16}}, {F32, {3}}, {F32, {3}}, {F32, {3}}};
  const Frame frame({{F32, {3, 16, 32}}, {F32, {3}}}, rets);
  const auto args = DecodeQuantize(frame.args(), frame.rets(), ByGroup("leading"));
  EXPECT(args.has_value() && args->rows == 48 && args->cols == 32);
  EXPECT(args.has_value() && args->out.groups == 3 && args->out.group_sizes == nullptr);
  EXPECT_CONTAINS(QuantizeError({{F32, {2, 24, 32}}, {F32, {3}}}, rets, ByGroup("leading")),
                  "number of rows of a group: expected a positive multiple of 16, got 24");
  EXPECT_CONTAINS(QuantizeError({{F32, {2, 16, 32}}, {F32, {3}}}, rets, ByGroup("leading")),
                  "x's first dimension: expected 3, got 2");
}

TEST(GroupedGemm) {
  const Frame frame({{E4M3, {37, 32}}, {E5M2, {3, 48, 32}}, {S32, {3}}, {F32, {3}}, {F32, {3}}, {BF16, {3, 48}}},
                    {{BF16, {37, 48}}});
  const GroupedGemmSpec spec = {true, false, "bfloat16", true, true};
  const auto args = DecodeGroupedGemm(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT(args->tokens == 37 && args->n == 48 && args->k == 32 && args->groups == 3 && args->fast_accumulation);
  EXPECT(args->lhs_scale_by_group && args->rhs_scale_by_group && args->lhs_scale_inv == frame.arg(3));
  EXPECT(args->group_sizes == frame.arg(2) && args->bias == frame.arg(5) && args->out == frame.ret(0));

  const auto error = [](const std::vector<Spec>& args, const GroupedGemmSpec& spec) {
    const Frame frame(args, {{BF16, {37, 48}}});
    const auto decoded = DecodeGroupedGemm(frame.args(), frame.rets(), spec);
    return decoded.has_error() ? decoded.error().message() : std::string();
  };
  const GroupedGemmSpec wide = {false, true, "bfloat16", false, false};
  EXPECT(error({{BF16, {37, 32}}, {BF16, {3, 32, 48}}, {S32, {3}}}, wide).empty());
  EXPECT_CONTAINS(error({{F32, {37, 32}}, {F32, {3, 32, 48}}, {S32, {3}}}, wide),
                  "te_jax grouped_gemm: lhs dtype: expected bfloat16, got float32");
  EXPECT_CONTAINS(error({{BF16, {37, 32}}, {BF16, {3, 48, 32}}, {S32, {3}}}, wide),
                  "rhs's contracted dimension: expected 32, got 48");
  EXPECT_CONTAINS(error({{E5M2, {37, 32}}, {E5M2, {3, 48, 32}}, {S32, {3}}, {F32, {3}}, {F32, {3}}}, spec),
                  "expected at least one float8_e4m3fn");
}

TEST(GroupedWgrad) {
  const Frame frame({{E4M3, {32, 48}}, {E5M2, {64, 48}}, {S32, {3}}, {F32, {3}}, {F32, {3}}}, {{F32, {3, 32, 64}}});
  const auto args = DecodeGroupedWgrad(frame.args(), frame.rets(), {3, true, "float32", false});
  EXPECT(args.has_value() && args->tokens == 48 && args->m == 32 && args->n == 64 && args->groups == 3);
  EXPECT(args->c == nullptr);
  const Spec f32{F32, {3}}, product{F32, {3, 32, 64}};
  const Frame added({{E4M3, {32, 48}}, {E5M2, {64, 48}}, {S32, {3}}, f32, f32, product}, {product});
  const auto adding = DecodeGroupedWgrad(added.args(), added.rets(), {3, true, "float32", false, true});
  EXPECT(adding.has_value() && adding->c == added.arg(5));
  const Frame narrow({{E4M3, {32, 48}}, {E5M2, {64, 48}}, {S32, {3}}, f32, f32, {BF16, {3, 32, 64}}}, {product});
  EXPECT_CONTAINS(DecodeGroupedWgrad(narrow.args(), narrow.rets(), {3, true, "float32", false, true}).error().message(),
                  "te_jax grouped_wgrad: c dtype: expected float32, got bfloat16");
  const Frame odd({{E4M3, {32, 37}}, {E5M2, {64, 37}}, {S32, {3}}, {F32, {3}}, {F32, {3}}}, {{F32, {3, 32, 64}}});
  EXPECT_CONTAINS(DecodeGroupedWgrad(odd.args(), odd.rets(), {3, true, "float32", false}).error().message(),
                  "te_jax grouped_wgrad: lhs's contracted dimension: expected a multiple of 16, padded, got 37");
}

TEST(StateOfGroups) {
  const Frame frame({{F32, {3, 2, 8}}, {F32, {3, 2}}, {F32, {3, 2, 66}}}, {{F32, {3}}, {F32, {3}}});
  const auto args = DecodeScaleRead(frame.args(), frame.rets(), {"e4m3 e5m2", 0, false, 3});
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT(args->leaves.formats.size() == 6 && args->leaves.formats[3] == DType::kE5M2 && args->leaves.history_len == 8);
  const auto* second = static_cast<const float*>(frame.ret(1));  // of quantizer 1, [groups]
  EXPECT(args->scales[0] == frame.ret(0) && args->scales[1] == second && args->scales[5] == second + 2);
  const Frame flat({{F32, {6, 8}}, {F32, {6}}, {F32, {6, 66}}}, {{F32, {3}}, {F32, {3}}});
  EXPECT_CONTAINS(DecodeScaleRead(flat.args(), flat.rets(), {"e4m3 e5m2", 0, false, 3}).error().message(),
                  "te_jax scale_read: amax_history shape: expected [3, 2, at least 1], got [6, 8]");
}

}  // namespace
}  // namespace te_jax

TEST_MAIN
