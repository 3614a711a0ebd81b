#include "csrc/ffi/grouped_gemm.h"

#include <string>

#include "csrc/core/fp8.h"
#include "csrc/ffi/check.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

constexpr std::initializer_list<DType> kFP8 = {DType::kE4M3, DType::kE5M2};
constexpr std::initializer_list<DType> kBF16 = {DType::kBF16};

void CheckDTypes(Operands& operands, std::string_view out_dtype, const Array& lhs, const Array& rhs, DType* out) {
  operands.Expect(ParseDType(out_dtype, out) && (*out == DType::kBF16 || *out == DType::kF32), "out_dtype",
                  "bfloat16 or float32", out_dtype);
  operands.Check(!(lhs.dtype == DType::kE5M2 && rhs.dtype == DType::kE5M2),
                 "lhs and rhs dtype: expected at least one float8_e4m3fn, got float8_e5m2 twice");
}

bool HasRank(Operands& operands, const Array& array, size_t rank) {
  return operands.ok() && operands.Expect(array.shape.size() == rank, std::string(array.name) + " rank",
                                          std::to_string(rank), std::to_string(array.shape.size()));
}

// group_sizes, and behind them the scales of FP8 operands: one for each group.
template <typename Args>
void DecodeGroups(Operands& operands, bool fp8, Args* out) {
  out->group_sizes = operands.Int32Of("group_sizes", {out->groups});
  operands.Expect(out->groups >= 1 && out->groups <= kMaxGroups, "number of groups",
                  "1 to " + std::to_string(kMaxGroups), std::to_string(out->groups));
  if (!fp8) return;
  out->lhs_scale_inv = operands.ArgOf<float>("lhs_scale_inv", DType::kF32, {out->groups});
  out->rhs_scale_inv = operands.ArgOf<float>("rhs_scale_inv", DType::kF32, {out->groups});
  out->lhs_scale_by_group = out->rhs_scale_by_group = true;
}

template <typename Args>
ffi::ErrorOr<Args> Finish(Operands& operands, Args out) {
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace

ffi::ErrorOr<GroupedGemmArgs> DecodeGroupedGemm(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                                const GroupedGemmSpec& spec) {
  Operands operands("grouped_gemm", args, rets);
  GroupedGemmArgs out;
  const Array lhs = operands.Arg("lhs", spec.fp8 ? kFP8 : kBF16);
  const Array rhs = operands.Arg("rhs", spec.fp8 ? kFP8 : kBF16);
  CheckDTypes(operands, spec.out_dtype, lhs, rhs, &out.out_dtype);
  operands.Check(!(spec.fp8 && spec.rhs_contract_first),
                 "rhs_contract_first: expected false for FP8 operands, got true");
  if (HasRank(operands, lhs, 2) && HasRank(operands, rhs, 3)) {
    const size_t kept = spec.rhs_contract_first ? 2 : 1;
    out.tokens = lhs.shape[0];
    out.k = lhs.shape[1];
    out.n = rhs.shape[kept];
    out.groups = rhs.shape[0];
    operands.Expect(out.tokens > 0, "number of tokens", "at least 1", std::to_string(out.tokens));
    operands.Expect(rhs.shape[3 - kept] == out.k, "rhs's contracted dimension", std::to_string(out.k),
                    std::to_string(rhs.shape[3 - kept]));
    operands.Aligned("contracted dimension", out.k);
    operands.Aligned("rhs's kept dimension (the result's last)", out.n);
  }
  DecodeGroups(operands, spec.fp8, &out);
  out.lhs_dtype = lhs.dtype;
  out.rhs_dtype = rhs.dtype;
  out.lhs = lhs.data;
  out.rhs = rhs.data;
  out.rhs_contract_first = spec.rhs_contract_first;
  out.fast_accumulation = spec.fast_accumulation;
  if (spec.bias) {
    const Array bias = operands.WithShape(operands.Arg("bias", {DType::kBF16, DType::kF32}), {out.groups, out.n});
    out.bias = bias.data;
    out.bias_dtype = bias.dtype;
  }
  out.out = operands.RetOf("out", out.out_dtype, {out.tokens, out.n});
  return Finish(operands, out);
}

ffi::ErrorOr<GroupedWgradArgs> DecodeGroupedWgrad(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                                  const GroupedWgradSpec& spec) {
  Operands operands("grouped_wgrad", args, rets);
  GroupedWgradArgs out;
  const Array lhs = operands.Arg("lhs", spec.fp8 ? kFP8 : kBF16);
  const Array rhs = operands.Arg("rhs", spec.fp8 ? kFP8 : kBF16);
  CheckDTypes(operands, spec.out_dtype, lhs, rhs, &out.out_dtype);
  out.groups = spec.groups;
  if (HasRank(operands, lhs, 2) && HasRank(operands, rhs, 2)) {
    const size_t contracted = spec.fp8 ? 1 : 0;
    out.tokens = lhs.shape[contracted];
    out.m = lhs.shape[1 - contracted];
    out.n = rhs.shape[1 - contracted];
    operands.Expect(rhs.shape[contracted] == out.tokens, "rhs's contracted dimension", std::to_string(out.tokens),
                    std::to_string(rhs.shape[contracted]));
    operands.Expect(out.tokens > 0, "number of tokens", "at least 1", std::to_string(out.tokens));
    operands.Expect(!spec.fp8 || PaddedTokens(out.tokens) == out.tokens, "lhs's contracted dimension",
                    "a multiple of 16, padded", std::to_string(out.tokens));
    operands.Aligned("lhs's kept dimension", out.m);
    operands.Aligned("rhs's kept dimension (the result's last)", out.n);
  }
  DecodeGroups(operands, spec.fp8, &out);
  out.lhs_dtype = lhs.dtype;
  out.rhs_dtype = rhs.dtype;
  out.lhs = lhs.data;
  out.rhs = rhs.data;
  out.fast_accumulation = spec.fast_accumulation;
  if (spec.accumulate) out.c = operands.ArgOf("c", out.out_dtype, {out.groups, out.m, out.n});
  out.out = operands.RetOf("out", out.out_dtype, {out.groups, out.m, out.n});
  return Finish(operands, out);
}

}  // namespace te_jax
