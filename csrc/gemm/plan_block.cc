#include "csrc/gemm/plan_block.h"

#include <limits>

#include "csrc/kernels/block_gemm_tiling.h"

namespace te_jax::gemm {
namespace {

// Below this share the last round of tiles costs more than the kernel gains.
constexpr double kLeastFill = 0.8;

std::string Expected(const char* what, const std::string& expected, const std::string& got) {
  return std::string(what) + ": expected " + expected + ", got " + got;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::string WhyNotBlockGemm(const BlockGemmShape& s) {
  if (s.a != DType::kE4M3) return Expected("lhs dtype", "float8_e4m3fn", NameOf(s.a));
  if (s.b != DType::kE4M3) return Expected("rhs dtype", "float8_e4m3fn", NameOf(s.b));
  if (s.out != DType::kBF16 && s.out != DType::kF32)
    return Expected("out dtype", "bfloat16 or float32", NameOf(s.out));
  const struct {
    const char* name;
    int64_t extent, multiple;
  } dims[] = {{"m", s.m, 1}, {"n", s.n, 8}, {"k", s.k, 16}};
  for (const auto& [name, extent, multiple] : dims) {
    if (extent < 1 || extent > std::numeric_limits<int32_t>::max() || extent % multiple != 0)
      return Expected(name, "a positive multiple of " + std::to_string(multiple) + " below 2^31",
                      std::to_string(extent));
  }
  if (s.alignment < 16) return Expected("alignment", "16 bytes or more", std::to_string(s.alignment));
  return "";
}

double BlockGemmFill(const BlockGemmShape& s, int multiprocessors) {
  const kernels::BlockGemmTiling tiling = kernels::TilingOf(s.vector_b);
  const int64_t at_once = multiprocessors / tiling.cluster;
  if (at_once < 1) return 0;
  const int64_t rows = tiling.Rows(), columns = tiling.Columns();
  const int64_t rounds = CeilDiv(CeilDiv(s.m, rows) * CeilDiv(s.n, columns), at_once);
  return static_cast<double>(s.m) * static_cast<double>(s.n) / static_cast<double>(rounds * at_once * rows * columns);
}

bool BlockGemmPays(const BlockGemmShape& shape, int multiprocessors) {
  return WhyNotBlockGemm(shape).empty() && BlockGemmFill(shape, multiprocessors) >= kLeastFill;
}

}  // namespace te_jax::gemm
