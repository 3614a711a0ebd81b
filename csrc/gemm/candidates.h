// The algorithms that there are for a GEMM: those that cuBLASLt offers, and kernels of ours.
#ifndef TE_JAX_GEMM_CANDIDATES_H_
#define TE_JAX_GEMM_CANDIDATES_H_

#include <vector>

#include "csrc/gemm/algorithm_table.h"
#include "csrc/gemm/operation.h"

namespace te_jax::gemm {

// At most `count` algorithms of cuBLASLt, the one that its heuristic expects to be fastest first, and with a `count`
// above 1 the kernels of ours that can compute it. Failing to find one of cuBLASLt is an error.
std::vector<AlgorithmBlob> Candidates(Calls& calls, cublasLtHandle_t handle, const Problem& problem,
                                      cublasLtMatmulDesc_t operation, int count);

// Whether an algorithm that was chosen in another process can be run here.
bool CanRun(Calls& calls, cublasLtHandle_t handle, const Problem& problem, cublasLtMatmulDesc_t operation,
            const AlgorithmBlob& algorithm);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_CANDIDATES_H_
