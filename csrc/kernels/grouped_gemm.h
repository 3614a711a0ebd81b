// Grouped GEMMs for Hopper: groups of tokens, ragged, of sizes that only the device knows. docs/design/0004.
#ifndef TE_JAX_KERNELS_GROUPED_GEMM_H_
#define TE_JAX_KERNELS_GROUPED_GEMM_H_

#include <cuda_runtime_api.h>

#include "csrc/core/grouped_args.h"

namespace te_jax::kernels {

// Queue one kernel each, whatever the sizes of groups are. No workspace. Allocate nothing, do not synchronise, may be
// captured in a graph. Results repeat bit for bit. Arguments are checked already (grouped_args.h says what is
// allowed; at most kMaxGroups groups, operands 16-byte aligned). Return the launch error, and cudaErrorInvalidValue
// where the driver takes no tensor map of the operands. No tokens, or no groups, are allowed.
cudaError_t LaunchGroupedGemm(const GroupedGemmArgs& args, cudaStream_t stream);
cudaError_t LaunchGroupedWgrad(const GroupedWgradArgs& args, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_H_
