// Which block-scaled products the own kernel (csrc/kernels/block_gemm.h) can take, and which it should. Pure host code.
#ifndef TE_JAX_GEMM_PLAN_BLOCK_H_
#define TE_JAX_GEMM_PLAN_BLOCK_H_

#include <cstdint>
#include <string>

#include "csrc/core/dtype.h"

namespace te_jax::gemm {

// out [m, n] = a [m, k] * b [n, k]^T, a scaled by 1 x 128 blocks, b by 128 x 128 or 1 x 128 ones.
struct BlockGemmShape {
  int64_t m = 0, n = 0, k = 0;
  DType a = DType::kE4M3, b = DType::kE4M3, out = DType::kBF16;
  bool vector_b = false;    // b is scaled by 1 x 128 blocks, not by 128 x 128 ones
  int32_t alignment = 256;  // bytes; of every matrix's and scale array's address
};

// Why the own kernel can't take it; empty if it can. What it has no place for at all (bias, accumulation into c, amax,
// a scaled by 128 x 128 blocks) is the caller's to see.
std::string WhyNotBlockGemm(const BlockGemmShape& shape);

// The share of the multiprocessors' time that goes into elements of the result: less than 1 by what a last, partly
// filled round of tiles and the padding of tiles waste.
double BlockGemmFill(const BlockGemmShape& shape, int multiprocessors);

// Whether the own kernel is the faster one: where it can take the product and tiles fill the GPU.
bool BlockGemmPays(const BlockGemmShape& shape, int multiprocessors);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_PLAN_BLOCK_H_
