// One GEMM for each group that has rows: what the CUDA kernels do in one launch.
#include <cstring>

#include "csrc/core/grouped_args.h"
#include "csrc/cpu/kernels.h"
#include "csrc/cpu/rows.h"

namespace te_jax::cpu {
namespace {

const uint8_t* At(const void* array, int64_t offset, DType dtype) {
  return static_cast<const uint8_t*>(array) + offset * SizeOf(dtype);
}
uint8_t* At(void* array, int64_t offset, DType dtype) { return static_cast<uint8_t*>(array) + offset * SizeOf(dtype); }

const float* ScaleOf(const float* scales, bool by_group, int64_t group) {
  return scales == nullptr ? nullptr : scales + (by_group ? group : 0);
}

// What the GEMMs of all groups have in common.
template <typename Args>
GemmArgs Common(const Args& args) {
  GemmArgs gemm;
  gemm.lhs_dtype = args.lhs_dtype;
  gemm.rhs_dtype = args.rhs_dtype;
  gemm.out_dtype = args.out_dtype;
  return gemm;
}

// The columns [first, first + count) of data [rows, stride], FP8, side by side.
void CopyColumns(const void* data, int64_t rows, int64_t stride, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(out + r * count, static_cast<const uint8_t*>(data) + r * stride + first, static_cast<size_t>(count));
  }
}

}  // namespace

bool GroupedGemm(const GroupedGemmArgs& args) {
  GemmArgs gemm = Common(args);
  gemm.n = args.n;
  gemm.k = args.k;
  gemm.rhs_contract_first = args.rhs_contract_first;
  gemm.bias_dtype = args.bias_dtype;
  int64_t start = 0;
  for (int64_t g = 0; g < args.groups; ++g) {
    const int64_t end = GroupEnd(start, args.group_sizes[g], args.tokens);
    if (end == start) continue;
    gemm.m = end - start;
    gemm.lhs = At(args.lhs, start * args.k, args.lhs_dtype);
    gemm.rhs = At(args.rhs, g * args.n * args.k, args.rhs_dtype);
    gemm.lhs_scale_inv = ScaleOf(args.lhs_scale_inv, args.lhs_scale_by_group, g);
    gemm.rhs_scale_inv = ScaleOf(args.rhs_scale_inv, args.rhs_scale_by_group, g);
    gemm.bias = args.bias == nullptr ? nullptr : At(args.bias, g * args.n, args.bias_dtype);
    gemm.out = At(args.out, start * args.n, args.out_dtype);
    if (!Gemm(gemm)) return false;
    start = end;
  }
  std::memset(At(args.out, start * args.n, args.out_dtype), 0,
              static_cast<size_t>((args.tokens - start) * args.n * SizeOf(args.out_dtype)));
  return true;
}

bool GroupedWgrad(const GroupedWgradArgs& args) {
  const bool fp8 = IsFP8(args.lhs_dtype);
  // Of the longest group that there can be.
  const Scratch<uint8_t> lhs(fp8 ? args.m * args.tokens : 0), rhs(fp8 ? args.n * args.tokens : 0);
  if (!lhs || !rhs) return false;
  GemmArgs gemm = Common(args);
  gemm.m = args.m;
  gemm.n = args.n;
  gemm.lhs_contract_first = gemm.rhs_contract_first = !fp8;
  gemm.beta = args.c == nullptr ? 0.0f : 1.0f;
  gemm.c_dtype = args.out_dtype;
  int64_t start = 0;
  for (int64_t g = 0; g < args.groups; ++g) {
    const int64_t end = GroupEnd(start, args.group_sizes[g], args.tokens);
    gemm.k = end - start;
    gemm.out = At(args.out, g * args.m * args.n, args.out_dtype);
    gemm.c = args.c == nullptr ? nullptr : At(args.c, g * args.m * args.n, args.out_dtype);
    if (gemm.k == 0) {
      const size_t bytes = static_cast<size_t>(args.m * args.n * SizeOf(args.out_dtype));
      if (gemm.c == nullptr) std::memset(gemm.out, 0, bytes);
      else if (gemm.c != gemm.out) std::memcpy(gemm.out, gemm.c, bytes);
      continue;
    }
    if (fp8) {
      CopyColumns(args.lhs, args.m, args.tokens, start, gemm.k, lhs.get());
      CopyColumns(args.rhs, args.n, args.tokens, start, gemm.k, rhs.get());
    }
    gemm.lhs = fp8 ? lhs.get() : At(args.lhs, start * args.m, args.lhs_dtype);
    gemm.rhs = fp8 ? rhs.get() : At(args.rhs, start * args.n, args.rhs_dtype);
    gemm.lhs_scale_inv = ScaleOf(args.lhs_scale_inv, args.lhs_scale_by_group, g);
    gemm.rhs_scale_inv = ScaleOf(args.rhs_scale_inv, args.rhs_scale_by_group, g);
    if (!Gemm(gemm)) return false;
    start = end;
  }
  return true;
}

}  // namespace te_jax::cpu
