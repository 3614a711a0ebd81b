// Kernels of ours that compute GEMMs. Where algorithms are timed they are candidates beside cuBLASLt's.
#ifndef TE_JAX_GEMM_OWN_KERNELS_H_
#define TE_JAX_GEMM_OWN_KERNELS_H_

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "csrc/core/args.h"
#include "csrc/gemm/algorithm_table.h"
#include "csrc/gemm/plan.h"

namespace te_jax::gemm {

struct OwnKernel {
  const char* name;  // in errors
  OwnAlgorithm algorithm;
  std::string (*why_not)(const GemmDesc&);  // empty if it can compute such a GEMM
  // Queues it. Scales of 128x128 blocks are as given, not padded (ScalePadding); there is no workspace.
  cudaError_t (*launch)(const GemmArgs&, cudaStream_t);
};

const std::vector<OwnKernel>& OwnKernels();

// The kernel that an algorithm is, if it is one of ours and can compute such a GEMM; otherwise null.
const OwnKernel* OwnKernelOf(const AlgorithmBlob& algorithm, const GemmDesc& desc);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_OWN_KERNELS_H_
