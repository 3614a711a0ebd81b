// What grouped kernels are asked to do: the tokens of a tensor are split into groups (experts), one behind the other,
// of sizes that only the device knows. Raw pointers and sizes as in args.h; no XLA and no CUDA types.
//
// `group_sizes` int32 [groups]: group g has the rows [offset, offset + group_sizes[g]), offset being the sum of the
// sizes before. Sizes are any numbers, 0 too; their sum may be less than the number of tokens, and the rows behind
// belong to no group: nothing is read of them that could reach a result. What can't be (negative sizes, a sum beyond
// the tokens) can't be an error here, since nobody on the host knows; it is cut off (GroupEnd) and stays inside of
// the arrays.
#ifndef TE_JAX_CORE_GROUPED_ARGS_H_
#define TE_JAX_CORE_GROUPED_ARGS_H_

#include <cstdint>

#include "csrc/core/args.h"
#include "csrc/core/scale.h"  // TE_JAX_HOST_DEVICE

namespace te_jax {

constexpr int64_t kMaxGroups = 1024;

// The end of a group that starts at `start`: all kernels cut sizes off in the same way.
TE_JAX_HOST_DEVICE inline int64_t GroupEnd(int64_t start, int32_t size, int64_t tokens) {
  const int64_t end = start + (size > 0 ? size : 0);
  return end < tokens ? end : tokens;
}

// Length of a row of a transposed FP8 copy [cols, PaddedTokens(tokens)]: the tensor copy engine wants rows of whole 16
// bytes. Groups lie in it as in the tokens, without padding between them. Behind the tokens are zeros.
TE_JAX_HOST_DEVICE constexpr int64_t PaddedTokens(int64_t tokens) { return (tokens + 15) / 16 * 16; }

// fprop and dgrad: out[rows of g] = lhs_scale_inv * rhs_scale_inv[g] * lhs[rows of g] . rhs[g] + bias[g]; rows that
// belong to no group are 0. Rounded once.
struct GroupedGemmArgs {
  int64_t tokens = 0, n = 0, k = 0, groups = 0;  // n, k: multiples of 16
  DType lhs_dtype = DType::kE4M3, rhs_dtype = DType::kE4M3;  // both kBF16, or FP8 but not both kE5M2
  DType out_dtype = DType::kBF16, bias_dtype = DType::kBF16;  // kBF16 or kF32
  bool rhs_contract_first = false;           // rhs is [groups, k, n]: kBF16 only
  bool fast_accumulation = false;            // FP8 only, docs/numerics.md; else every 128 products are added in fp32
  const int32_t* group_sizes = nullptr;      // [groups]
  const void* lhs = nullptr;                 // [tokens, k]
  const void* rhs = nullptr;                 // [groups, n, k]
  const float* lhs_scale_inv = nullptr;      // [1], or [groups] if lhs_scale_by_group; FP8 only
  const float* rhs_scale_inv = nullptr;      // [1], or [groups] if rhs_scale_by_group; FP8 only
  bool lhs_scale_by_group = false, rhs_scale_by_group = true;
  const void* bias = nullptr;                // [groups, n] or null
  void* out = nullptr;                       // [tokens, n]
};

// wgrad: out[g] = lhs_scale_inv * rhs_scale_inv * lhs[rows of g]^T . rhs[rows of g] (+ c[g]); 0 (or c) for an empty
// group.
struct GroupedWgradArgs {
  int64_t tokens = 0, m = 0, n = 0, groups = 0;  // m, n: multiples of 16
  DType lhs_dtype = DType::kE4M3, rhs_dtype = DType::kE4M3;  // both kBF16, or FP8 but not both kE5M2
  DType out_dtype = DType::kBF16;        // kBF16 or kF32
  bool fast_accumulation = false;        // FP8 only
  const int32_t* group_sizes = nullptr;  // [groups]
  const void* lhs = nullptr;             // kBF16: [tokens, m]; FP8: [m, PaddedTokens(tokens)]
  const void* rhs = nullptr;             // kBF16: [tokens, n]; FP8: [n, PaddedTokens(tokens)]
  const float* lhs_scale_inv = nullptr;  // [1], or [groups] if lhs_scale_by_group; FP8 only
  const float* rhs_scale_inv = nullptr;  // [1], or [groups] if rhs_scale_by_group; FP8 only
  bool lhs_scale_by_group = false, rhs_scale_by_group = false;
  const void* c = nullptr;               // [groups, m, n] of out_dtype, or null; may be equal to out
  void* out = nullptr;                   // [groups, m, n]
};

}  // namespace te_jax

#endif  // TE_JAX_CORE_GROUPED_ARGS_H_
