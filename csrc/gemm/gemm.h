// Runs a GEMM through cuBLASLt: description -> plan (plan.h) -> algorithm (cached) -> launch.
#ifndef TE_JAX_GEMM_GEMM_H_
#define TE_JAX_GEMM_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "csrc/core/args.h"

namespace te_jax::gemm {

// Device memory that a GEMM gets as workspace, aligned to 16 bytes: what cuBLAS recommends for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

struct Status {
  enum Code { kOk, kUnsupported, kInternal };
  Code code = kOk;
  std::string message;  // empty if kOk
};

// Queues the GEMM on `stream`. The first call for a description asks cuBLASLt's heuristic for an algorithm and keeps
// the first one, so that a program runs the same algorithm every time. FP32 operands are multiplied in FP32, not in
// TF32. Sums are rounded once, with one exception that is cuBLASLt's: in place (c == out) and with a 16-bit result, the
// FP8 kernels round the product before they add c (seen with 13.1).
Status Launch(const GemmArgs& args, void* workspace, cudaStream_t stream);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_GEMM_H_
