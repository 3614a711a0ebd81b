// Decoding of te_jax_collective_gemm, with hand-made call frames.
#include "csrc/ffi/collective_gemm.h"
#include "csrc/tests/check.h"
#include "csrc/tests/frame.h"

namespace te_jax {
namespace {

CollectiveGemmSpec Scatter() {
  CollectiveGemmSpec spec{};
  spec.kind = "matmul_reduce_scatter";
  spec.ranks = 4;
  spec.fp8 = true;
  spec.out_dtype = "bfloat16";
  spec.lhs_scaling = spec.rhs_scaling = "tensor";
  spec.chunks = 2;
  spec.timeout_ms = 7;
  return spec;
}

CollectiveGemmSpec Gather() {
  CollectiveGemmSpec spec = Scatter();
  spec.kind = "all_gather_matmul";
  return spec;
}

const Spec kLhs = {E4M3, {3, 8, 64}}, kRhs = {E4M3, {32, 64}}, kScale = {F32, {}}, kPlace = {S32, {2}};

std::string ErrorOf(const std::vector<Spec>& args, const std::vector<Spec>& rets, const CollectiveGemmSpec& spec) {
  const Frame frame(args, rets);
  const auto decoded = DecodeCollectiveGemm(frame.args(), frame.rets(), spec);
  return decoded.has_error() ? decoded.error().message() : "";
}

TEST(ReduceScatter) {
  CollectiveGemmSpec spec = Scatter();
  spec.bias = spec.direct = true;
  const Frame frame({kLhs, kRhs, kScale, kScale, {BF16, {32}}, kPlace}, {{BF16, {3, 2, 32}}});
  const auto decoded = DecodeCollectiveGemm(frame.args(), frame.rets(), spec);
  EXPECT(decoded.has_value());
  if (!decoded.has_value()) return;
  const comm::CollectiveGemm& call = decoded->call;
  EXPECT_EQ(call.gemm.m, 24);
  EXPECT_EQ(call.gemm.n, 32);
  EXPECT_EQ(call.gemm.k, 64);
  EXPECT_EQ(call.batch, 3);
  EXPECT_EQ(call.problem.block_rows, 6);
  EXPECT_EQ(call.problem.ranks, 4);
  EXPECT_EQ(call.problem.chunks, 2);
  EXPECT(call.problem.direct && !call.problem.keep && !call.problem.sum);
  EXPECT(call.gemm.lhs == frame.arg(0) && call.gemm.rhs == frame.arg(1) && call.gemm.bias == frame.arg(4));
  EXPECT(call.gemm.lhs_scale_inv == frame.arg(2) && call.gemm.rhs_scale_inv == frame.arg(3));
  EXPECT(decoded->place == frame.arg(5));
  EXPECT(call.gemm.out == frame.ret(0));
  EXPECT_EQ(call.timeout_ns, 7'000'000u);
}

TEST(AllGatherWithAllResults) {
  CollectiveGemmSpec spec = Gather();
  spec.out_dtype = "float8_e4m3fn";
  spec.keep_gathered = spec.amax = true;
  const Frame frame({kLhs, kRhs, kScale, kScale, kScale, kPlace},
                    {{E4M3, {3, 32, 32}}, {E4M3, {3, 32, 64}}, {F32, {4}}, {F32, {}}});
  const auto decoded = DecodeCollectiveGemm(frame.args(), frame.rets(), spec);
  EXPECT(decoded.has_value());
  if (!decoded.has_value()) return;
  EXPECT_EQ(decoded->call.problem.block_rows, 24);
  EXPECT(decoded->call.problem.keep);
  EXPECT(decoded->call.gemm.out_scale == frame.arg(4));
  EXPECT(decoded->call.kept == frame.ret(1) && decoded->call.kept_scale_inv == frame.ret(2));
  EXPECT(decoded->call.gemm.amax == frame.ret(3));
}

TEST(AnRhsThatIsContractedFirst) {
  CollectiveGemmSpec spec = Scatter();
  spec.fp8 = false;
  spec.rhs_contract_first = true;
  EXPECT_EQ(ErrorOf({{BF16, {8, 64}}, {BF16, {64, 32}}, kPlace}, {{BF16, {2, 32}}}, spec).size(), 0u);
  EXPECT_CONTAINS(ErrorOf({{BF16, {8, 64}}, {BF16, {32, 64}}, kPlace}, {{BF16, {2, 32}}}, spec),
                  "rhs's contracted dimension: expected 64, got [32, 64]");
}

TEST(Blocks) {
  CollectiveGemmSpec spec = Gather();
  spec.lhs_scaling = "block_1x128";
  spec.rhs_scaling = "block_128x128";
  spec.chunks = 1;
  spec.keep_gathered = true;
  const Spec lhs = {E4M3, {8, 272}}, rhs = {E4M3, {144, 272}}, a = {F32, {3, 8}}, b = {F32, {2, 3}};
  const std::vector<Spec> out = {{BF16, {32, 144}}, {E4M3, {32, 272}}, {F32, {3, 32}}};
  EXPECT_EQ(ErrorOf({lhs, rhs, a, b, kPlace}, out, spec).size(), 0u);
  EXPECT_CONTAINS(ErrorOf({lhs, rhs, kScale, b, kPlace}, out, spec), "lhs_scale_inv shape: expected [3, 8], got []");
  EXPECT_CONTAINS(ErrorOf({lhs, rhs, a, b, kPlace}, {out[0], out[1], {F32, {4}}}, spec),
                  "gathered_scale_inv shape: expected [3, 32], got [4]");
  EXPECT_CONTAINS(ErrorOf({{E4M3, {2, 8, 272}}, rhs, {F32, {3, 2, 8}}, b, kPlace}, out, spec),
                  "lhs: expected no batch dimension in blocks, got a batch of 2");
  EXPECT_CONTAINS(ErrorOf({{E4M3, {12, 272}}, rhs, {F32, {3, 12}}, b, kPlace}, out, spec),
                  "rows of a rank's block: expected a multiple of 8 in blocks, got 12");
  spec.chunks = 2;
  EXPECT_CONTAINS(ErrorOf({lhs, rhs, a, b, kPlace}, out, spec), "chunks: expected 1 for all_gather_matmul in blocks");
  spec.chunks = 1;
  spec.lhs_scaling = "block_128x128";
  EXPECT_CONTAINS(ErrorOf({lhs, rhs, {F32, {1, 3}}, b, kPlace}, out, spec), "lhs_scaling: expected block_1x128");
}

TEST(Errors) {
  const std::vector<Spec> args = {kLhs, kRhs, kScale, kScale, kPlace}, out = {{BF16, {3, 2, 32}}};
  EXPECT_EQ(ErrorOf(args, out, Scatter()).size(), 0u);
  const auto with = [&](auto change, CollectiveGemmSpec spec = Scatter()) {
    change(spec);
    return ErrorOf(args, out, spec);
  };
  EXPECT_CONTAINS(with([](auto& spec) { spec.kind = "matmul"; }), "te_jax collective_gemm: kind: expected matmul_reduce");
  EXPECT_CONTAINS(with([](auto& spec) { spec.ranks = 3; }), "number of rows: expected a multiple of ranks = 3, got 8");
  EXPECT_CONTAINS(with([](auto& spec) { spec.ranks = 0; }), "number of rows: expected a multiple of ranks = 0, got 8");
  EXPECT_CONTAINS(with([](auto& spec) { spec.ranks = 1; }), "ranks: expected 2 to 16, got 1");
  EXPECT_CONTAINS(with([](auto& spec) { spec.chunks = 0; }), "chunks: expected 1 to 16, got 0");
  EXPECT_CONTAINS(with([](auto& spec) { spec.timeout_ms = 0; }), "timeout_ms: expected at least 1, got 0");
  EXPECT_CONTAINS(with([](auto& spec) { spec.keep_gathered = true; }), "keep_gathered: expected false");
  EXPECT_CONTAINS(with([](auto& spec) { spec.direct = true; }, Gather()), "direct: expected false");
  EXPECT_CONTAINS(with([](auto& spec) { spec.amax = true; }), "amax: expected an FP8 out_dtype");
  EXPECT_CONTAINS(with([](auto& spec) { spec.lhs_scaling = "block_1x128"; }), "expected blocks for both operands, got tensor for one");
  EXPECT_CONTAINS(with([](auto& spec) { spec.rhs_contract_first = true; }), "expected false for FP8 operands, got true");
  EXPECT_CONTAINS(with([](auto& spec) { spec.fp8 = false; }), "lhs dtype: expected float32 or bfloat16 or float16");
  EXPECT_CONTAINS(with([](auto& spec) { spec.out_dtype = "int8"; }), "out_dtype: expected float32, bfloat16");
  EXPECT_CONTAINS(ErrorOf(args, {{BF16, {3, 8, 32}}}, Scatter()), "out shape: expected [3, 2, 32], got [3, 8, 32]");
  EXPECT_CONTAINS(ErrorOf({{E4M3, {64}}, kRhs, kScale, kScale, kPlace}, out, Scatter()), "lhs rank: expected at least 2");
  EXPECT_CONTAINS(ErrorOf({kLhs, {E4M3, {24, 64}}, kScale, kScale, kPlace}, out, Scatter()),
                  "rhs's kept dimension (the result's last): expected a positive multiple of 16, got 24");
  EXPECT_CONTAINS(ErrorOf({{E5M2, {8, 64}}, {E5M2, {32, 64}}, kScale, kScale, kPlace}, out, Scatter()),
                  "expected at least one float8_e4m3fn");
  EXPECT_CONTAINS(ErrorOf({kLhs, kRhs, kScale, kScale, {S32, {3}}}, out, Scatter()), "place shape: expected [2], got [3]");
  EXPECT_CONTAINS(ErrorOf({kLhs, kRhs, kScale, kScale}, out, Scatter()), "place is missing");
}

}  // namespace
}  // namespace te_jax

TEST_MAIN
