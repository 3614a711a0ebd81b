#include "csrc/gemm/plan.h"
#include "csrc/tests/check.h"

namespace te_jax::gemm {
namespace {

GemmDesc FP8Desc() {
  GemmDesc desc;
  desc.m = 32;
  desc.n = 48;
  desc.k = 64;
  return desc;
}

std::string Reason(const GemmDesc& desc) {
  const auto planned = MakePlan(desc);
  const auto* reason = std::get_if<std::string>(&planned);
  return reason == nullptr ? "" : *reason;
}

TEST(FP8IsTransposedNormal) {
  const auto planned = MakePlan(FP8Desc());
  const auto& plan = std::get<GemmPlan>(planned);
  EXPECT(plan.fp8 && plan.transpose_a && !plan.transpose_b);
  // A is rhs [48, 64], column-major [64, 48]; B is lhs [32, 64].
  EXPECT(plan.a.rows == 64 && plan.a.cols == 48 && plan.a.ld == 64);
  EXPECT(plan.b.rows == 64 && plan.b.cols == 32 && plan.b.ld == 64);
  EXPECT(plan.d.rows == 48 && plan.d.cols == 32 && plan.d.ld == 48);
  EXPECT(plan.c.dtype == DType::kBF16);
}

TEST(ContractFirst) {
  GemmDesc desc = FP8Desc();
  desc.lhs = desc.rhs = desc.out = DType::kBF16;
  desc.lhs_contract_first = desc.rhs_contract_first = true;
  const auto planned = MakePlan(desc);
  const auto& plan = std::get<GemmPlan>(planned);
  EXPECT(!plan.fp8 && !plan.transpose_a && plan.transpose_b);
  EXPECT(plan.a.rows == 48 && plan.a.cols == 64 && plan.a.ld == 48);  // rhs [64, 48]
  EXPECT(plan.b.rows == 32 && plan.b.cols == 64 && plan.b.ld == 32);  // lhs [64, 32]
}

TEST(FP8ResultHasABF16C) {
  GemmDesc desc = FP8Desc();
  desc.out = DType::kE4M3;
  const auto planned = MakePlan(desc);
  EXPECT(std::get<GemmPlan>(planned).c.dtype == DType::kBF16);
  EXPECT(std::get<GemmPlan>(planned).d.dtype == DType::kE4M3);
}

TEST(UnsupportedTypesAreNamed) {
  GemmDesc desc = FP8Desc();
  desc.lhs = desc.rhs = DType::kE5M2;
  EXPECT_CONTAINS(Reason(desc), "rhs dtype: expected float8_e4m3fn beside float8_e5m2");
  desc = FP8Desc();
  desc.rhs = DType::kBF16;
  EXPECT_CONTAINS(Reason(desc), "rhs dtype: expected an FP8 format, like lhs, got bfloat16");
  desc = FP8Desc();
  desc.rhs_contract_first = true;
  EXPECT_CONTAINS(Reason(desc), "contract_first: expected false");
  desc = FP8Desc();
  desc.out = DType::kE5M2;
  EXPECT_CONTAINS(Reason(desc), "out dtype: expected float8_e4m3fn");
  desc.rhs = DType::kE5M2;
  EXPECT(Reason(desc).empty());
  desc = FP8Desc();
  desc.has_bias = true;
  EXPECT(Reason(desc).empty());
  desc.bias_dtype = DType::kF32;
  EXPECT_CONTAINS(Reason(desc), "bias dtype: expected bfloat16, got float32");
  desc = FP8Desc();
  desc.out = DType::kE4M3;
  desc.accumulates = true;
  EXPECT_CONTAINS(Reason(desc), "beta: expected 0 for an FP8 result");
  desc = FP8Desc();
  desc.lhs = desc.rhs = DType::kF32;
  EXPECT_CONTAINS(Reason(desc), "out dtype: expected float32, got bfloat16");
}

TEST(Blocks) {
  GemmDesc desc = FP8Desc();
  desc.lhs_scaling = Scaling::kBlock1x128;
  EXPECT_CONTAINS(Reason(desc), "rhs_scaling: expected blocks beside a block-scaled lhs, got tensor");
  desc.rhs_scaling = Scaling::kBlock128x128;
  EXPECT(Reason(desc).empty());
  EXPECT_CONTAINS(ToString(desc), "block_1x128 by block_128x128");
  desc.lhs_scaling = Scaling::kBlock128x128;
  EXPECT_CONTAINS(Reason(desc), "rhs_scaling: expected block_1x128 beside block_128x128");
  desc.rhs_scaling = Scaling::kBlock1x128;
  EXPECT(Reason(desc).empty());
  desc.fast_accumulation = true;
  EXPECT_CONTAINS(Reason(desc), "fast_accumulation: expected false");
  desc.fast_accumulation = false;
  desc.out = DType::kE4M3;
  EXPECT_CONTAINS(Reason(desc), "out dtype: expected high precision");
  desc = FP8Desc();
  desc.lhs = desc.rhs = DType::kBF16;
  desc.lhs_scaling = desc.rhs_scaling = Scaling::kBlock1x128;
  EXPECT_CONTAINS(Reason(desc), "lhs dtype: expected an FP8 format where operands are block-scaled");
}

TEST(ScalesOfSquaresArePaddedWhereTheirRowsAreNotAligned) {
  GemmDesc desc = FP8Desc();
  desc.n = 300;
  desc.lhs_scaling = Scaling::kBlock1x128;
  desc.rhs_scaling = Scaling::kBlock128x128;
  for (const int64_t k : {128, 512, 640}) {
    desc.k = k;
    const ScalePadding padding(desc);
    EXPECT_EQ(padding.bytes(), k == 512 ? 0u : 256u);
    if (k == 512) continue;
    EXPECT_EQ(padding.rows, 3u);
    EXPECT_EQ(padding.width, k == 128 ? 4u : 20u);
    EXPECT_EQ(padding.pitch, k == 128 ? 16u : 32u);
  }
}

TEST(DescOfArgs) {
  GemmArgs args;
  alignas(256) static char memory[1024];
  args.lhs = memory;
  args.rhs = memory + 256;
  args.out = memory + 512;
  EXPECT_EQ(DescOf(args).alignment, 256);
  args.rhs = memory + 256 + 16;
  EXPECT_EQ(DescOf(args).alignment, 16);
  args.rhs = memory + 256;
  args.rhs_scale_inv = reinterpret_cast<float*>(memory + 768 + 4);
  EXPECT_EQ(DescOf(args).alignment, 256);
  args.lhs_scaling = args.rhs_scaling = Scaling::kBlock1x128;
  EXPECT_EQ(DescOf(args).alignment, 4);
  args.lhs_scaling = args.rhs_scaling = Scaling::kTensor;
  EXPECT(!DescOf(args).accumulates && !DescOf(args).in_place && !DescOf(args).has_bias);
  args.beta = 1.0f;
  args.c = args.out;
  EXPECT(DescOf(args).accumulates && DescOf(args).in_place);
}

TEST(KeysDiffer) {
  const GemmDesc desc = FP8Desc();
  GemmDesc other = desc;
  EXPECT(desc == other && HashOf(desc) == HashOf(other));
  other.fast_accumulation = true;
  EXPECT(!(desc == other) && HashOf(desc) != HashOf(other));
  EXPECT_CONTAINS(ToString(other), "m=32 n=48 k=64 lhs=float8_e4m3fn rhs=float8_e4m3fn out=bfloat16 fast_accumulation");
}

}  // namespace
}  // namespace te_jax::gemm

TEST_MAIN
