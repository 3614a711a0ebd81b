#include "csrc/ffi/gemm.h"

#include <string>

#include "csrc/core/fp8.h"
#include "csrc/ffi/check.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

// An operand's shape, split: the kept dimensions and the contracted ones, and whether the latter come first.
struct Split {
  Shape kept, contracted;
};

Split SplitShape(Operands& operands, const Array& array, int64_t contract_dims, bool contract_first) {
  Split split;
  if (!operands.ok()) return split;
  const int64_t rank = static_cast<int64_t>(array.shape.size());
  if (!operands.Expect(contract_dims >= 1 && rank > contract_dims, std::string(array.name) + " rank",
                       "at least contract_dims + 1, with contract_dims = " + std::to_string(contract_dims),
                       std::to_string(rank))) {
    return split;
  }
  const auto cut = array.shape.begin() + (contract_first ? contract_dims : rank - contract_dims);
  Shape first(array.shape.begin(), cut), last(cut, array.shape.end());
  split.kept = contract_first ? last : first;
  split.contracted = contract_first ? first : last;
  return split;
}

// cuBLASLt multiplies E4M3 by E4M3 and E4M3 by E5M2 (either side), never E5M2 by E5M2.
void CheckDTypes(Operands& operands, const GemmSpec& spec, const Array& lhs, const Array& rhs, DType out_dtype) {
  if (spec.fp8) {
    operands.Check(!(lhs.dtype == DType::kE5M2 && rhs.dtype == DType::kE5M2),
                   "lhs and rhs dtype: expected at least one float8_e4m3fn, got float8_e5m2 twice");
    operands.Check(!spec.lhs_contract_first && !spec.rhs_contract_first,
                   "lhs_contract_first, rhs_contract_first: expected false for FP8 operands, got true");
  } else {
    operands.Expect(lhs.dtype == rhs.dtype, "rhs dtype", NameOf(lhs.dtype), NameOf(rhs.dtype));
    operands.Expect(!IsFP8(out_dtype), "out_dtype of a GEMM that is not FP8", "bfloat16, float16 or float32",
                    NameOf(out_dtype));
  }
}

// Minor and contracted dimensions, flattened as the kernels see them. A row-major operand [m, k] has minor k.
void CheckSizes(Operands& operands, const GemmArgs& gemm) {
  operands.Aligned("contracted dimension", gemm.k);
  operands.Aligned("rhs's kept dimension (the result's last)", gemm.n);
  if (gemm.lhs_contract_first) {
    operands.Aligned("lhs's kept dimension, its last one", gemm.m);
  } else {
    operands.Expect(gemm.m > 0, "lhs's number of rows", "at least 1", std::to_string(gemm.m));
    operands.Expect(gemm.lhs_scaling != Scaling::kBlock1x128 || gemm.m % 8 == 0, "lhs's number of rows",
                    "a multiple of 8 in block_1x128", std::to_string(gemm.m));
  }
}

// Block-scaled operands: what cuBLASLt has kernels for.
void CheckScaling(Operands& operands, const GemmSpec& spec, GemmArgs* gemm) {
  operands.Expect(ParseScaling(spec.lhs_scaling, &gemm->lhs_scaling), "lhs_scaling", kScalings, spec.lhs_scaling);
  operands.Expect(ParseScaling(spec.rhs_scaling, &gemm->rhs_scaling), "rhs_scaling", kScalings, spec.rhs_scaling);
  const bool lhs = gemm->lhs_scaling != Scaling::kTensor, rhs = gemm->rhs_scaling != Scaling::kTensor;
  if (!lhs && !rhs) return;
  operands.Check(lhs && rhs, "lhs_scaling, rhs_scaling: expected blocks for both operands, got tensor for one");
  operands.Check(gemm->lhs_scaling == Scaling::kBlock1x128 || gemm->rhs_scaling == Scaling::kBlock1x128,
                 "lhs_scaling, rhs_scaling: expected block_1x128 for one operand, got block_128x128 twice");
  operands.Check(spec.fp8, "fp8: expected true for block-scaled operands, got false");
  operands.Check(!spec.fast_accumulation, "fast_accumulation: expected false for block-scaled operands, got true");
  operands.Expect(!IsFP8(gemm->out_dtype), "out_dtype of block-scaled operands", "bfloat16, float16 or float32",
                  NameOf(gemm->out_dtype));
}

const float* DecodeScales(Operands& operands, std::string_view name, const Array& array, int64_t contract_dims,
                          Scaling scaling) {
  if (!operands.ok() || scaling == Scaling::kTensor) return operands.ArgOf<float>(name, DType::kF32, {});
  operands.Expect(scaling == Scaling::kBlock1x128 || array.shape.size() == 2, std::string(array.name) + " rank",
                  "2 in block_128x128", std::to_string(array.shape.size()));
  operands.Expect(contract_dims == 1 || array.shape.back() % kBlock == 0, std::string(array.name) + "'s last dimension",
                  "a multiple of 128 where several are contracted", std::to_string(array.shape.back()));
  if (!operands.ok()) return nullptr;
  return operands.ArgOf<float>(name, DType::kF32,
                               BlockScaleShape(array.shape, static_cast<size_t>(contract_dims), scaling));
}

}  // namespace

ffi::ErrorOr<GemmArgs> DecodeGemm(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                  const GemmSpec& spec) {
  Operands operands("gemm", args, rets);
  GemmArgs out;
  operands.Expect(ParseDType(spec.out_dtype, &out.out_dtype), "out_dtype",
                  "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2", spec.out_dtype);
  const auto fp8 = {DType::kE4M3, DType::kE5M2};
  const Array lhs = operands.Arg("lhs", spec.fp8 ? fp8 : kHighPrecision);
  const Array rhs = operands.Arg("rhs", spec.fp8 ? fp8 : kHighPrecision);
  CheckDTypes(operands, spec, lhs, rhs, out.out_dtype);
  CheckScaling(operands, spec, &out);
  const Split l = SplitShape(operands, lhs, spec.contract_dims, spec.lhs_contract_first);
  const Split r = SplitShape(operands, rhs, spec.contract_dims, spec.rhs_contract_first);
  operands.Expect(l.contracted == r.contracted, "rhs's contracted dimensions", ToString(l.contracted),
                  ToString(r.contracted));

  out.m = Product(l.kept, 0, l.kept.size());
  out.n = Product(r.kept, 0, r.kept.size());
  out.k = Product(l.contracted, 0, l.contracted.size());
  out.lhs_contract_first = spec.lhs_contract_first;
  out.rhs_contract_first = spec.rhs_contract_first;
  if (operands.ok()) CheckSizes(operands, out);
  out.lhs_dtype = lhs.dtype;
  out.rhs_dtype = rhs.dtype;
  out.lhs = lhs.data;
  out.rhs = rhs.data;
  out.alpha = spec.alpha;
  out.beta = spec.beta;
  out.fast_accumulation = spec.fast_accumulation;

  Shape shape = l.kept;  // of the result: [*L, *R]
  shape.insert(shape.end(), r.kept.begin(), r.kept.end());
  if (spec.fp8) {
    out.lhs_scale_inv = DecodeScales(operands, "lhs_scale_inv", lhs, spec.contract_dims, out.lhs_scaling);
    out.rhs_scale_inv = DecodeScales(operands, "rhs_scale_inv", rhs, spec.contract_dims, out.rhs_scaling);
  }
  if (spec.bias) {
    const Array bias = operands.WithShape(operands.Arg("bias", kHighPrecision), r.kept);
    out.bias = bias.data;
    out.bias_dtype = bias.dtype;
  }
  operands.Check(!spec.in_place || spec.beta != 0.0f, "in_place: expected beta != 0, got 0");
  if (spec.beta != 0.0f) {
    const Array c = operands.WithShape(operands.Arg("c", kHighPrecision), shape);
    operands.Expect(IsFP8(out.out_dtype) || c.dtype == out.out_dtype, "c dtype", NameOf(out.out_dtype),
                    NameOf(c.dtype));
    operands.Check(!spec.in_place || c.dtype == out.out_dtype, "in_place: expected c in the dtype of the result");
    out.c = c.data;
    out.c_dtype = c.dtype;
  }
  if (IsFP8(out.out_dtype)) out.out_scale = operands.ArgOf<float>("out_scale", DType::kF32, {});
  out.out = operands.RetOf("out", out.out_dtype, shape);
  operands.Check(!spec.amax || IsFP8(out.out_dtype), "amax: expected an FP8 out_dtype");
  if (spec.amax) out.amax = operands.RetOf<float>("amax", DType::kF32, {});
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
