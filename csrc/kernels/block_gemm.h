// A block-scaled GEMM for Hopper, written for E4M3 operands with scales of 128 elements. docs/design/0003.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_H_
#define TE_JAX_KERNELS_BLOCK_GEMM_H_

#include <cuda_runtime_api.h>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Queues a GEMM that csrc/gemm/plan_block.h has nothing against, by tiles of `tile_rows` rows and 128 columns: 256, or
// 192 too where rhs is scaled by 1x128 blocks. Every 128 products along k are added up by the tensor cores and then,
// scaled, in fp32, in the order of k: results repeat bit for bit, and are the same with both tile sizes. They are
// rounded once, also in place. Allocates nothing, does not synchronise. Returns the launch error, and
// cudaErrorInvalidValue where the driver takes no tensor map of the operands.
cudaError_t LaunchBlockGemm(const GemmArgs& args, int tile_rows, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_H_
