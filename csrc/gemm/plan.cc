#include "csrc/gemm/plan.h"

#include <algorithm>
#include <initializer_list>
#include <tuple>

#include "csrc/core/dtype.h"
#include "csrc/core/fp8.h"

namespace te_jax::gemm {
namespace {

auto Fields(const GemmDesc& d) {
  return std::make_tuple(d.m, d.n, d.k, d.lhs, d.rhs, d.out, d.c, d.bias_dtype, d.lhs_contract_first,
                         d.rhs_contract_first, d.fast_accumulation, d.has_bias, d.accumulates, d.in_place, d.has_amax,
                         d.alignment, d.has_alpha, d.lhs_scaling, d.rhs_scaling);
}

int32_t CommonAlignment(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 256;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int32_t>(bits & (~bits + 1));
}

std::string Expected(const char* operand, const std::string& expected, DType got) {
  return std::string(operand) + " dtype: expected " + expected + ", got " + NameOf(got);
}

// The table of FP8 types in cuBLASLt's reference, section cublasLtMatmul.
std::string WhyNotFP8(const GemmDesc& desc) {
  if (!IsFP8(desc.rhs)) return Expected("rhs", "an FP8 format, like lhs", desc.rhs);
  const bool has_e5m2 = desc.lhs == DType::kE5M2 || desc.rhs == DType::kE5M2;
  if (desc.lhs == DType::kE5M2 && desc.rhs == DType::kE5M2)
    return Expected("rhs", "float8_e4m3fn beside float8_e5m2", desc.rhs);
  if (desc.lhs_contract_first || desc.rhs_contract_first) {
    return "contract_first: expected false for FP8 operands (Hopper multiplies K-major FP8 only), got true";
  }
  if (desc.out == DType::kE5M2 && !has_e5m2)
    return Expected("out", "float8_e4m3fn for float8_e4m3fn operands", desc.out);
  const bool half = desc.out == DType::kF16;
  if (desc.has_bias && desc.bias_dtype != (half ? DType::kF16 : DType::kBF16)) {
    return Expected("bias", half ? "float16" : "bfloat16", desc.bias_dtype);
  }
  if (IsFP8(desc.out) && desc.accumulates)
    return "beta: expected 0 for an FP8 result, which cuBLASLt does not accumulate";
  return "";
}

// cublasLtMatmul, "1D and 2D block scaling for FP8 data types with 128-element blocks".
std::string WhyNotBlocks(const GemmDesc& desc) {
  const auto expected = [&](const char* what, const char* wanted, Scaling got) {
    return std::string(what) + ": expected " + wanted + ", got " + NameOf(got);
  };
  if (!IsFP8(desc.lhs)) return Expected("lhs", "an FP8 format where operands are block-scaled", desc.lhs);
  if (desc.rhs_scaling == Scaling::kTensor)
    return expected("rhs_scaling", "blocks beside a block-scaled lhs", desc.rhs_scaling);
  if (desc.lhs_scaling == Scaling::kTensor)
    return expected("lhs_scaling", "blocks beside a block-scaled rhs", desc.lhs_scaling);
  if (desc.lhs_scaling == Scaling::kBlock128x128 && desc.rhs_scaling == Scaling::kBlock128x128)
    return expected("rhs_scaling", "block_1x128 beside block_128x128", desc.rhs_scaling);
  if (desc.fast_accumulation) return "fast_accumulation: expected false for block-scaled operands, got true";
  if (IsFP8(desc.out)) return Expected("out", "high precision for block-scaled operands", desc.out);
  return "";
}

std::string WhyNot(const GemmDesc& desc) {
  if (desc.lhs_scaling != Scaling::kTensor || desc.rhs_scaling != Scaling::kTensor) {
    if (std::string reason = WhyNotBlocks(desc); !reason.empty()) return reason;
  }
  if (desc.has_amax && !IsFP8(desc.out)) return Expected("out", "an FP8 format where amax is wanted", desc.out);
  if (desc.accumulates && desc.c != desc.out && !IsFP8(desc.out)) return Expected("c", NameOf(desc.out), desc.c);
  if (IsFP8(desc.lhs)) return WhyNotFP8(desc);
  if (desc.rhs != desc.lhs) return Expected("rhs", NameOf(desc.lhs), desc.rhs);
  if (desc.out != desc.lhs && desc.out != DType::kF32) {
    const std::string wanted = desc.lhs == DType::kF32 ? "float32" : std::string(NameOf(desc.lhs)) + " or float32";
    return Expected("out", wanted, desc.out);
  }
  if (desc.has_bias && desc.bias_dtype != desc.out) return Expected("bias", NameOf(desc.out), desc.bias_dtype);
  return "";
}

}  // namespace

bool GemmDesc::operator==(const GemmDesc& other) const { return Fields(*this) == Fields(other); }

size_t HashOf(const GemmDesc& desc) {
  size_t hash = 0;
  const auto mix = [&hash](auto value) {
    hash ^= static_cast<size_t>(value) + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  };
  std::apply([&mix](auto... fields) { (mix(fields), ...); }, Fields(desc));
  return hash;
}

std::string ToString(const GemmDesc& desc) {
  const auto flag = [](bool set, const char* name) { return set ? std::string(" ") + name : std::string(); };
  return "m=" + std::to_string(desc.m) + " n=" + std::to_string(desc.n) + " k=" + std::to_string(desc.k) +
         " lhs=" + NameOf(desc.lhs) + " rhs=" + NameOf(desc.rhs) + " out=" + NameOf(desc.out) +
         (desc.has_bias ? std::string(" bias=") + NameOf(desc.bias_dtype) : "") +
         (desc.accumulates ? std::string(" c=") + NameOf(desc.c) : "") + flag(desc.in_place, "in_place") +
         flag(desc.lhs_contract_first, "lhs_contract_first") + flag(desc.rhs_contract_first, "rhs_contract_first") +
         flag(desc.fast_accumulation, "fast_accumulation") + flag(desc.has_amax, "amax") +
         flag(desc.has_alpha, "alpha") +
         (IsBlockScaled(desc) ? std::string(" ") + NameOf(desc.lhs_scaling) + " by " + NameOf(desc.rhs_scaling) : "") +
         " alignment=" + std::to_string(desc.alignment);
}

GemmDesc DescOf(const GemmArgs& args) {
  GemmDesc desc;
  desc.m = args.m;
  desc.n = args.n;
  desc.k = args.k;
  desc.lhs = args.lhs_dtype;
  desc.rhs = args.rhs_dtype;
  desc.out = args.out_dtype;
  desc.lhs_contract_first = args.lhs_contract_first;
  desc.rhs_contract_first = args.rhs_contract_first;
  desc.fast_accumulation = args.fast_accumulation;
  desc.has_bias = args.bias != nullptr;
  if (desc.has_bias) desc.bias_dtype = args.bias_dtype;
  desc.accumulates = args.beta != 0.0f;
  if (desc.accumulates) desc.c = args.c_dtype;
  desc.in_place = desc.accumulates && args.c == args.out;
  desc.has_amax = args.amax != nullptr;
  desc.has_alpha = args.alpha != 1.0f;
  desc.lhs_scaling = args.lhs_scaling;
  desc.rhs_scaling = args.rhs_scaling;
  desc.alignment = CommonAlignment({args.lhs, args.rhs, args.out, desc.accumulates ? args.c : nullptr});
  if (IsBlockScaled(desc)) {
    const int32_t others = CommonAlignment({args.lhs_scale_inv, args.rhs_scale_inv, args.bias});
    desc.alignment = std::min(desc.alignment, others);
  }
  return desc;
}

ScalePadding::ScalePadding(const GemmDesc& desc) {
  const bool lhs = desc.lhs_scaling == Scaling::kBlock128x128, rhs = desc.rhs_scaling == Scaling::kBlock128x128;
  const auto blocks = static_cast<size_t>(NumBlocks(desc.k));
  if ((!lhs && !rhs) || blocks % 4 == 0) return;
  rows = static_cast<size_t>(NumBlocks(lhs ? desc.m : desc.n));
  width = blocks * sizeof(float);
  pitch = (blocks + 3) / 4 * 4 * sizeof(float);
}

std::variant<GemmPlan, std::string> MakePlan(const GemmDesc& desc) {
  if (std::string reason = WhyNot(desc); !reason.empty()) return reason;
  GemmPlan plan;
  plan.fp8 = IsFP8(desc.lhs);
  // Row-major [r, c] is column-major [c, r]: rhs [n, k] is A [k, n], used transposed; lhs [m, k] is B [k, m], used as
  // it is.
  plan.transpose_a = !desc.rhs_contract_first;
  plan.a =
      desc.rhs_contract_first ? Matrix{desc.rhs, desc.n, desc.k, desc.n} : Matrix{desc.rhs, desc.k, desc.n, desc.k};
  plan.transpose_b = desc.lhs_contract_first;
  plan.b =
      desc.lhs_contract_first ? Matrix{desc.lhs, desc.m, desc.k, desc.m} : Matrix{desc.lhs, desc.k, desc.m, desc.k};
  plan.d = {desc.out, desc.n, desc.m, desc.n};
  // C is described even where beta is 0; for an FP8 result it is the type of the bias.
  plan.c = {IsFP8(desc.out) ? DType::kBF16 : desc.out, desc.n, desc.m, desc.n};
  return plan;
}

}  // namespace te_jax::gemm
