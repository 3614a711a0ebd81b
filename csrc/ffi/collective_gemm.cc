#include "csrc/ffi/collective_gemm.h"

#include <string>

#include "csrc/core/fp8.h"
#include "csrc/ffi/check.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

void CheckDTypes(Operands& operands, const CollectiveGemmSpec& spec, const Array& lhs, const Array& rhs, DType out) {
  operands.Check(!(lhs.dtype == DType::kE5M2 && rhs.dtype == DType::kE5M2),
                 "lhs and rhs dtype: expected at least one float8_e4m3fn, got float8_e5m2 twice");
  operands.Check(!(spec.fp8 && spec.rhs_contract_first), "rhs_contract_first: expected false for FP8 operands, got true");
  operands.Expect(spec.fp8 || lhs.dtype == rhs.dtype, "rhs dtype", NameOf(lhs.dtype), NameOf(rhs.dtype));
  operands.Expect(spec.fp8 || !IsFP8(out), "out_dtype of a GEMM that is not FP8", "bfloat16, float16 or float32",
                  NameOf(out));
  operands.Check(!spec.amax || IsFP8(out), "amax: expected an FP8 out_dtype");
}

void CheckScaling(Operands& operands, const CollectiveGemmSpec& spec, GemmArgs* gemm) {
  operands.Expect(ParseScaling(spec.lhs_scaling, &gemm->lhs_scaling), "lhs_scaling", kScalings, spec.lhs_scaling);
  operands.Expect(ParseScaling(spec.rhs_scaling, &gemm->rhs_scaling), "rhs_scaling", kScalings, spec.rhs_scaling);
  const bool lhs = gemm->lhs_scaling != Scaling::kTensor, rhs = gemm->rhs_scaling != Scaling::kTensor;
  if (!lhs && !rhs) return;
  operands.Check(lhs && rhs, "lhs_scaling, rhs_scaling: expected blocks for both operands, got tensor for one");
  operands.Check(spec.fp8, "fp8: expected true for block-scaled operands, got false");
  operands.Check(!spec.fast_accumulation, "fast_accumulation: expected false for block-scaled operands, got true");
  operands.Expect(!IsFP8(gemm->out_dtype), "out_dtype of block-scaled operands", "bfloat16, float16 or float32",
                  NameOf(gemm->out_dtype));
}

const float* DecodeScales(Operands& operands, std::string_view name, const Array& array, Scaling scaling) {
  const bool tensor = !operands.ok() || scaling == Scaling::kTensor;
  return operands.ArgOf<float>(name, DType::kF32, tensor ? Shape{} : BlockScaleShape(array.shape, 1, scaling));
}

// The schedule of `spec` for blocks of that many rows.
comm::Problem ProblemOf(Operands& operands, const CollectiveGemmSpec& spec, int64_t block_rows, DType out) {
  comm::Problem problem;
  const bool gathers = spec.kind == "all_gather_matmul";
  operands.Expect(gathers || spec.kind == "matmul_reduce_scatter", "kind", "matmul_reduce_scatter or all_gather_matmul",
                  spec.kind);
  problem.collective = gathers ? comm::Collective::kAllGatherMatmul : comm::Collective::kMatmulReduceScatter;
  problem.ranks = static_cast<int>(spec.ranks);
  problem.block_rows = block_rows;
  problem.chunks = static_cast<int>(spec.chunks);
  problem.direct = spec.direct;
  problem.keep = spec.keep_gathered;
  problem.sum = IsFP8(out);  // a GEMM that adds what the peer sent has no output scale
  operands.Check(gathers || !spec.keep_gathered, "keep_gathered: expected false for matmul_reduce_scatter, got true");
  operands.Check(!(gathers && spec.direct), "direct: expected false for all_gather_matmul, got true");
  return problem;
}

}  // namespace

ffi::ErrorOr<CollectiveGemmCall> DecodeCollectiveGemm(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                                      const CollectiveGemmSpec& spec) {
  Operands operands("collective_gemm", args, rets);
  CollectiveGemmCall out;
  GemmArgs& gemm = out.call.gemm;
  operands.Expect(ParseDType(spec.out_dtype, &gemm.out_dtype), "out_dtype",
                  "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2", spec.out_dtype);
  CheckScaling(operands, spec, &gemm);
  operands.Expect(spec.timeout_ms > 0, "timeout_ms", "at least 1", std::to_string(spec.timeout_ms));
  const auto fp8 = {DType::kE4M3, DType::kE5M2};
  const Array lhs = operands.Arg("lhs", spec.fp8 ? fp8 : kHighPrecision);
  const Array rhs = operands.Arg("rhs", spec.fp8 ? fp8 : kHighPrecision);
  CheckDTypes(operands, spec, lhs, rhs, gemm.out_dtype);
  if (operands.ok()) {
    operands.Expect(lhs.shape.size() >= 2, "lhs rank", "at least 2", std::to_string(lhs.shape.size()));
    operands.Expect(rhs.shape.size() == 2, "rhs rank", "2", std::to_string(rhs.shape.size()));
  }
  Shape shape = lhs.shape, gathered = lhs.shape;
  if (operands.ok()) {
    const size_t rank = lhs.shape.size();
    const bool gathers = spec.kind == "all_gather_matmul";
    const int64_t rows = lhs.shape[rank - 2];
    out.call.batch = Product(lhs.shape, 0, rank - 2);
    gemm.k = lhs.shape[rank - 1];
    gemm.n = rhs.shape[spec.rhs_contract_first ? 1 : 0];
    gemm.m = out.call.batch * rows;
    operands.Expect(rhs.shape[spec.rhs_contract_first ? 0 : 1] == gemm.k, "rhs's contracted dimension",
                    std::to_string(gemm.k), ToString(rhs.shape));
    operands.Expect(gathers || (spec.ranks > 0 && rows % spec.ranks == 0), "lhs's number of rows",
                    "a multiple of ranks = " + std::to_string(spec.ranks), std::to_string(rows));
    operands.Aligned("contracted dimension", gemm.k);
    operands.Aligned("rhs's kept dimension (the result's last)", gemm.n);
  }
  if (operands.ok()) {
    const size_t rank = lhs.shape.size();
    const bool gathers = spec.kind == "all_gather_matmul";
    out.call.problem = ProblemOf(operands, spec, gathers ? gemm.m : gemm.m / spec.ranks, gemm.out_dtype);
    const auto why = comm::WhyNot(out.call);
    operands.Check(!why.has_value(), why.value_or(""));
    shape[rank - 1] = gemm.n;
    shape[rank - 2] = gathers ? shape[rank - 2] * spec.ranks : shape[rank - 2] / spec.ranks;
    gathered[rank - 2] *= spec.ranks;
  }
  gemm.lhs_dtype = lhs.dtype;
  gemm.rhs_dtype = rhs.dtype;
  gemm.c_dtype = gemm.out_dtype;
  gemm.rhs_contract_first = spec.rhs_contract_first;
  gemm.fast_accumulation = spec.fast_accumulation;
  gemm.lhs = lhs.data;
  gemm.rhs = rhs.data;
  if (spec.fp8) {
    gemm.lhs_scale_inv = DecodeScales(operands, "lhs_scale_inv", lhs, gemm.lhs_scaling);
    gemm.rhs_scale_inv = DecodeScales(operands, "rhs_scale_inv", rhs, gemm.rhs_scaling);
  }
  if (spec.bias) {
    const Array bias = operands.WithShape(operands.Arg("bias", kHighPrecision), {gemm.n});
    gemm.bias = bias.data;
    gemm.bias_dtype = bias.dtype;
  }
  if (IsFP8(gemm.out_dtype)) gemm.out_scale = operands.ArgOf<float>("out_scale", DType::kF32, {});
  out.place = operands.Int32Of("place", {2});
  gemm.out = operands.RetOf("out", gemm.out_dtype, shape);
  if (spec.keep_gathered) {
    out.call.kept = operands.RetOf("gathered", gemm.lhs_dtype, gathered);
    const bool blocks = operands.ok() && gemm.lhs_scaling != Scaling::kTensor;
    const Shape scales = blocks ? BlockScaleShape(gathered, 1, gemm.lhs_scaling) : Shape{spec.ranks};
    if (spec.fp8) out.call.kept_scale_inv = operands.RetOf<float>("gathered_scale_inv", DType::kF32, scales);
  }
  if (spec.amax) gemm.amax = operands.RetOf<float>("amax", DType::kF32, {});
  out.call.timeout_ns = static_cast<uint64_t>(spec.timeout_ms) * 1'000'000;
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
