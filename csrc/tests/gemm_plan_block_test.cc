#include "csrc/gemm/plan_block.h"

#include <cmath>

#include "csrc/kernels/block_gemm_tiling.h"
#include "csrc/tests/check.h"

namespace te_jax::gemm {
namespace {

BlockGemmShape Shape(int64_t m, int64_t n, int64_t k) {
  BlockGemmShape shape;
  shape.m = m;
  shape.n = n;
  shape.k = k;
  return shape;
}

bool Near(double a, double b) { return std::abs(a - b) < 1e-9; }

TEST(WhatItTakes) {
  EXPECT(WhyNotBlockGemm(Shape(1, 8, 16)).empty());
  EXPECT(WhyNotBlockGemm(Shape(8192, 14336, 4096)).empty());
  BlockGemmShape shape = Shape(256, 256, 256);
  shape.out = DType::kF32;
  EXPECT(WhyNotBlockGemm(shape).empty());
}

TEST(ReasonsNameWhatIsWrong) {
  EXPECT(WhyNotBlockGemm(Shape(0, 8, 16)) == "m: expected a positive multiple of 1 below 2^31, got 0");
  EXPECT(WhyNotBlockGemm(Shape(8, 12, 16)) == "n: expected a positive multiple of 8 below 2^31, got 12");
  EXPECT(WhyNotBlockGemm(Shape(8, 8, 24)) == "k: expected a positive multiple of 16 below 2^31, got 24");
  EXPECT(WhyNotBlockGemm(Shape(int64_t{1} << 31, 8, 16)) ==
         "m: expected a positive multiple of 1 below 2^31, got 2147483648");
  BlockGemmShape shape = Shape(256, 256, 256);
  shape.alignment = 8;
  EXPECT(WhyNotBlockGemm(shape) == "alignment: expected 16 bytes or more, got 8");
  shape = Shape(256, 256, 256);
  shape.a = DType::kE5M2;
  EXPECT(WhyNotBlockGemm(shape) == "lhs dtype: expected float8_e4m3fn, got float8_e5m2");
  shape = Shape(256, 256, 256);
  shape.b = DType::kBF16;
  EXPECT(WhyNotBlockGemm(shape) == "rhs dtype: expected float8_e4m3fn, got bfloat16");
  shape = Shape(256, 256, 256);
  shape.out = DType::kF16;
  EXPECT(WhyNotBlockGemm(shape) == "out dtype: expected bfloat16 or float32, got float16");
}

// The numbers below follow from the tilings: whoever changes those counts again.
TEST(Fill) {
  static_assert(kernels::kTilingByBlocks.Rows() == 256 && kernels::kTilingByBlocks.Columns() == 256);
  // 8 x 16 pairs of tiles for 66 pairs of blocks at a time: 2 rounds.
  EXPECT(Near(BlockGemmFill(Shape(2048, 4096, 4096), 132), 128.0 / 132));
  EXPECT(Near(BlockGemmFill(Shape(256, 256, 64), 132), 1.0 / 66));
  // One row more than a tile costs a tile.
  EXPECT(Near(BlockGemmFill(Shape(257, 256, 64), 2), 257.0 / 512));
  EXPECT(BlockGemmFill(Shape(256, 256, 64), 1) == 0);
}

TEST(FillWhereBothAreScaledByVectors) {
  static_assert(kernels::kTilingByVectors.Rows() == 128 && kernels::kTilingByVectors.Columns() == 256);
  BlockGemmShape shape = Shape(2048, 4096, 4096);  // 16 x 16 pairs of tiles: 4 rounds
  shape.vector_b = true;
  EXPECT(Near(BlockGemmFill(shape, 132), 256.0 / 264));
  shape = Shape(129, 256, 64);
  shape.vector_b = true;
  EXPECT(Near(BlockGemmFill(shape, 2), 129.0 / 256));
}

TEST(PaysWhereTilesFillTheGpu) {
  EXPECT(BlockGemmPays(Shape(8192, 8192, 8192), 132));
  EXPECT(BlockGemmPays(Shape(2048, 4096, 4096), 132));
  EXPECT(!BlockGemmPays(Shape(256, 4096, 4096), 132));  // 16 of 66 pairs of blocks
  EXPECT(!BlockGemmPays(Shape(8192, 8192, 8200), 132));  // k, however well it fills
}

}  // namespace
}  // namespace te_jax::gemm

TEST_MAIN
