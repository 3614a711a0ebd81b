#include "csrc/gemm/plan_block.h"

#include <limits>

#include "csrc/core/dtype.h"

namespace te_jax::gemm {
namespace {

std::string Expected(const char* what, const std::string& expected, const std::string& got) {
  return std::string(what) + ": expected " + expected + ", got " + got;
}

}  // namespace

std::string WhyNotBlockGemm(const GemmDesc& d, Scaling rhs_scaling) {
  if (d.lhs_scaling != Scaling::kBlock1x128) return Expected("lhs_scaling", "block_1x128", NameOf(d.lhs_scaling));
  if (d.rhs_scaling != rhs_scaling) return Expected("rhs_scaling", NameOf(rhs_scaling), NameOf(d.rhs_scaling));
  if (d.lhs != DType::kE4M3) return Expected("lhs dtype", "float8_e4m3fn", NameOf(d.lhs));
  if (d.rhs != DType::kE4M3) return Expected("rhs dtype", "float8_e4m3fn", NameOf(d.rhs));
  if (d.out != DType::kBF16 && d.out != DType::kF32)
    return Expected("out dtype", "bfloat16 or float32", NameOf(d.out));
  if (d.has_bias && d.bias_dtype != DType::kBF16) return Expected("bias dtype", "bfloat16", NameOf(d.bias_dtype));
  if (d.accumulates && d.c != d.out) return Expected("c dtype", NameOf(d.out), NameOf(d.c));
  const struct {
    const char* name;
    int64_t extent, multiple;  // rows of tensor maps are 16 bytes or a multiple of them
  } dims[] = {{"m", d.m, 4}, {"n", d.n, 8}, {"k", d.k, 16}};
  for (const auto& [name, extent, multiple] : dims) {
    if (extent < 1 || extent > std::numeric_limits<int32_t>::max() || extent % multiple != 0)
      return Expected(name, "a positive multiple of " + std::to_string(multiple) + " below 2^31",
                      std::to_string(extent));
  }
  if (d.alignment < 16) return Expected("alignment", "16 bytes or more", std::to_string(d.alignment));
  return "";
}

}  // namespace te_jax::gemm
