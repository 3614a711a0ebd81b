#include "csrc/gemm/plan_block.h"

#include "csrc/tests/check.h"

namespace te_jax::gemm {
namespace {

constexpr Scaling kRows = Scaling::kBlock1x128, kSquares = Scaling::kBlock128x128;

GemmDesc Desc(int64_t m, int64_t n, int64_t k, Scaling rhs = kSquares) {
  GemmDesc desc;
  desc.m = m;
  desc.n = n;
  desc.k = k;
  desc.lhs_scaling = kRows;
  desc.rhs_scaling = rhs;
  return desc;
}

std::string Reason(const GemmDesc& desc) { return WhyNotBlockGemm(desc, desc.rhs_scaling); }

TEST(WhatItTakes) {
  EXPECT(Reason(Desc(8, 16, 16)).empty());
  EXPECT(Reason(Desc(8192, 14336, 4096)).empty());
  GemmDesc desc = Desc(264, 272, 400, kRows);
  desc.out = desc.c = DType::kF32;
  desc.has_bias = desc.accumulates = desc.in_place = desc.has_alpha = true;
  desc.alignment = 16;
  EXPECT(Reason(desc).empty());
}

TEST(EachKernelTakesItsScales) {
  EXPECT_CONTAINS(WhyNotBlockGemm(Desc(256, 256, 256), kRows), "rhs_scaling: expected block_1x128, got block_128x128");
  EXPECT_CONTAINS(WhyNotBlockGemm(Desc(256, 256, 256, kRows), kSquares),
                  "rhs_scaling: expected block_128x128, got block_1x128");
  GemmDesc desc = Desc(256, 256, 256, kRows);
  desc.lhs_scaling = kSquares;
  EXPECT_CONTAINS(Reason(desc), "lhs_scaling: expected block_1x128, got block_128x128");
  desc.lhs_scaling = desc.rhs_scaling = Scaling::kTensor;
  EXPECT_CONTAINS(WhyNotBlockGemm(desc, kRows), "lhs_scaling: expected block_1x128, got tensor");
}

TEST(ReasonsNameWhatIsWrong) {
  EXPECT_CONTAINS(Reason(Desc(0, 8, 16)), "m: expected a positive multiple of 4 below 2^31, got 0");
  EXPECT_CONTAINS(Reason(Desc(6, 8, 16)), "m: expected a positive multiple of 4 below 2^31, got 6");
  EXPECT_CONTAINS(Reason(Desc(8, 12, 16)), "n: expected a positive multiple of 8 below 2^31, got 12");
  EXPECT_CONTAINS(Reason(Desc(8, 8, 24)), "k: expected a positive multiple of 16 below 2^31, got 24");
  EXPECT_CONTAINS(Reason(Desc(int64_t{1} << 31, 8, 16)),
                  "m: expected a positive multiple of 4 below 2^31, got 2147483648");
  GemmDesc desc = Desc(256, 256, 256);
  desc.alignment = 8;
  EXPECT_CONTAINS(Reason(desc), "alignment: expected 16 bytes or more, got 8");
  desc = Desc(256, 256, 256);
  desc.lhs = DType::kE5M2;
  EXPECT_CONTAINS(Reason(desc), "lhs dtype: expected float8_e4m3fn, got float8_e5m2");
  desc = Desc(256, 256, 256);
  desc.rhs = DType::kE5M2;
  EXPECT_CONTAINS(Reason(desc), "rhs dtype: expected float8_e4m3fn, got float8_e5m2");
  desc = Desc(256, 256, 256);
  desc.out = DType::kF16;
  EXPECT_CONTAINS(Reason(desc), "out dtype: expected bfloat16 or float32, got float16");
  desc = Desc(256, 256, 256);
  desc.has_bias = true;
  desc.bias_dtype = DType::kF32;
  EXPECT_CONTAINS(Reason(desc), "bias dtype: expected bfloat16, got float32");
  desc = Desc(256, 256, 256);
  desc.accumulates = true;
  desc.c = DType::kF32;
  EXPECT_CONTAINS(Reason(desc), "c dtype: expected bfloat16, got float32");
}

}  // namespace
}  // namespace te_jax::gemm

TEST_MAIN
