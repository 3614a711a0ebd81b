// out = a * b^T, both E4M3 with a scale for each 1 x 128 or 128 x 128 block: an own kernel for Hopper.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_H_
#define TE_JAX_KERNELS_BLOCK_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace te_jax::kernels {

// Scales multiply (they are inverses of what data were multiplied by when quantized). Every 128 products along K are
// added up by the tensor cores and then, scaled, in fp32.
struct BlockGemmArgs {
  int64_t m, n, k;       // k a multiple of 16, n of 8
  const void* a;         // [m, k] E4M3, 16-byte aligned
  const float* scale_a;  // [ceil(k / 128), m padded to 4]
  const void* b;         // [n, k] E4M3, 16-byte aligned
  const float* scale_b;  // [ceil(n / 128), ld_scale_b], or with vector_b [ceil(k / 128), n padded to 4]
  int64_t ld_scale_b;    // at least ceil(k / 128); any, no padding is needed
  bool vector_b;         // b is scaled by 1 x 128 blocks, not by 128 x 128 ones
  void* out;             // [m, n], 16-byte aligned
  bool out_f32;          // else bf16
};

// Queues the product. For args that csrc/gemm/plan_block.h has nothing against; returns the launch error, and
// cudaErrorInvalidValue where the driver takes no tensor map of them. Allocates nothing and does not synchronise.
cudaError_t LaunchBlockGemm(const BlockGemmArgs& args, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_H_
