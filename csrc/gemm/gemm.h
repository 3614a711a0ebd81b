// Runs a GEMM through cuBLASLt: description -> plan (plan.h) -> algorithm (cached) -> launch.
#ifndef TE_JAX_GEMM_GEMM_H_
#define TE_JAX_GEMM_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "csrc/core/args.h"
#include "csrc/gemm/algorithm_table.h"

namespace te_jax::gemm {

// Device memory that a GEMM gets as workspace, aligned to 16 bytes: what cuBLAS recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

struct Status {
  enum Code { kOk, kUnsupported, kInternal };
  Code code = kOk;
  std::string message;  // empty if kOk
};

// Queues the GEMM on `stream`, which may be capturing. The first call for a description chooses an algorithm, which a
// device keeps for the rest of the process: the first that cuBLASLt's heuristic offers, or the fastest of 16 and the
// kernels of ours if they are timed (timing.h). FP32 operands are multiplied in FP32, not in TF32. Sums are rounded
// once, with one exception that is cuBLASLt's: in place (c == out) and with a 16-bit result, the FP8 kernels round the
// product before they add c (seen with 13.1).
Status Launch(const GemmArgs& args, void* workspace, cudaStream_t stream);

// Whether algorithms are chosen by timing them, from now on. They are unless this says otherwise.
void SetTimed(bool enabled);

// The choices that were made by timing, and those that were loaded to be used instead.
AlgorithmTable& Algorithms();

// Algorithms().Load(key, choice), for GEMMs that are launched or captured from now on.
bool LoadAlgorithm(const AlgorithmKey& key, const Choice& choice);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_GEMM_H_
