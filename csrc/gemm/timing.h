// Times the algorithms of a GEMM on the GPU.
#ifndef TE_JAX_GEMM_TIMING_H_
#define TE_JAX_GEMM_TIMING_H_

#include <vector>

#include "csrc/gemm/algorithm_table.h"
#include "csrc/gemm/operation.h"

namespace te_jax::gemm {

// The candidate to use for `problem`, the heuristic's first if others can't be timed (Choice::note says why).
//
// Runs on a stream and in memory of its own, on random data (zeros take less power and time), so it disturbs no one's
// data and may run while the calling thread captures a graph on `stream`. If it doesn't, what `stream` still has to do
// is awaited first, for a second at most, so that it doesn't take part. `args` says what is wanted; its pointers aren't
// read.
Choice ChooseByTiming(Calls& calls, cublasLtHandle_t handle, const Problem& problem, const GemmArgs& args,
                      const std::vector<AlgorithmBlob>& candidates, cudaStream_t stream);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_TIMING_H_
