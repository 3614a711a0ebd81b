// What a GEMM is (GemmDesc) and how cuBLASLt is asked for it (GemmPlan). Pure host code without a CUDA call, so that it
// can be tested anywhere.
#ifndef TE_JAX_GEMM_PLAN_H_
#define TE_JAX_GEMM_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "csrc/core/args.h"

namespace te_jax::gemm {

// Everything of GemmArgs that an algorithm may depend on; the key of the algorithm cache. The values of alpha and beta
// and the pointers are not here: one algorithm serves all of them.
struct GemmDesc {
  int64_t m = 0, n = 0, k = 0;
  DType lhs = DType::kE4M3, rhs = DType::kE4M3, out = DType::kBF16;
  DType c = DType::kBF16, bias_dtype = DType::kBF16;
  bool lhs_contract_first = false, rhs_contract_first = false;
  bool fast_accumulation = false;
  bool has_bias = false, accumulates = false, in_place = false, has_amax = false;
  bool has_alpha = false;  // not 1
  Scaling lhs_scaling = Scaling::kTensor, rhs_scaling = Scaling::kTensor;
  // Bytes; the largest power of two up to 256 that divides every matrix's address, and of block-scaled operands those
  // of the scales and the bias.
  int32_t alignment = 256;

  bool operator==(const GemmDesc& other) const;
};

inline bool IsBlockScaled(const GemmDesc& desc) { return desc.lhs_scaling != Scaling::kTensor; }

GemmDesc DescOf(const GemmArgs& args);
size_t HashOf(const GemmDesc& desc);
std::string ToString(const GemmDesc& desc);

// A matrix as cuBLASLt sees it: column-major, `ld` elements between columns.
struct Matrix {
  DType dtype;
  int64_t rows, cols, ld;
};

// D [n, m] = op(A) op(B) + C in column-major order, which is out [m, n] in row-major order: A is rhs, B is lhs.
struct GemmPlan {
  Matrix a, b, c, d;
  bool transpose_a, transpose_b;
  bool fp8;
};

// cuBLASLt wants the scales of 128x128 blocks [row blocks, k blocks padded to 4]. Where they have to be copied for
// that, the copy takes the end of the workspace.
struct ScalePadding {
  size_t rows = 0, width = 0, pitch = 0;  // row blocks; bytes of a row, and from one to the next

  explicit ScalePadding(const GemmDesc& desc);
  size_t bytes() const { return (rows * pitch + 255) / 256 * 256; }  // 0: nothing has to be copied
};

// The plan, or why there is none: the types that cuBLASLt has no Hopper kernels for.
std::variant<GemmPlan, std::string> MakePlan(const GemmDesc& desc);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_PLAN_H_
