// out = a * b^T, both E4M3 with a scale for each 1 x 128 or 128 x 128 block: an own kernel for Hopper.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_H_
#define TE_JAX_KERNELS_BLOCK_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace te_jax::kernels {

// Scales multiply (they are inverses of what data were multiplied by when quantized), in cuBLASLt's layouts.
struct BlockGemmArgs {
  int64_t m, n, k;       // k a multiple of 16, n of 8
  const void* a;         // [m, k] E4M3, 16-byte aligned
  const float* scale_a;  // [ceil(k / 128), m padded to 4]
  const void* b;         // [n, k] E4M3, 16-byte aligned
  const float* scale_b;  // [ceil(n / 128), ceil(k / 128) padded to 4], or with vector_b [ceil(k / 128), n padded to 4]
  bool vector_b;         // b is scaled by 1 x 128 blocks, not by 128 x 128 ones
  void* out;             // [m, n], 16-byte aligned
  bool out_f32;          // else bf16
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_H_
