// The algorithms that cuBLASLt offers for a GEMM.
#ifndef TE_JAX_GEMM_CANDIDATES_H_
#define TE_JAX_GEMM_CANDIDATES_H_

#include <vector>

#include "csrc/gemm/operation.h"

namespace te_jax::gemm {

// At most `count` algorithms, the one that the heuristic expects to be fastest first. Failing to find one is an error.
std::vector<cublasLtMatmulAlgo_t> Candidates(Calls& calls, cublasLtHandle_t handle, const Problem& problem,
                                             cublasLtMatmulDesc_t operation, int count);

// Whether an algorithm that was chosen in another process can be run here.
bool CanRun(Calls& calls, cublasLtHandle_t handle, const Problem& problem, cublasLtMatmulDesc_t operation,
            const cublasLtMatmulAlgo_t& algorithm);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_CANDIDATES_H_
