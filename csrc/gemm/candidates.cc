#include "csrc/gemm/candidates.h"

#include "csrc/gemm/own_kernels.h"

namespace te_jax::gemm {

std::vector<AlgorithmBlob> Candidates(Calls& calls, cublasLtHandle_t handle, const Problem& problem,
                                      cublasLtMatmulDesc_t operation, int count) {
  cublasLtMatmulPreference_t preference = nullptr;
  if (!calls.Ok("cublasLtMatmulPreferenceCreate", calls.lt.preference_create(&preference))) return {};
  const Owned<cublasLtMatmulPreference_t> owned(preference, calls.lt.preference_destroy);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    calls.Ok("cublasLtMatmulPreferenceSetAttribute",
             calls.lt.preference_set(preference, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WorkspaceBytes(problem.desc));
  // A split contraction is added up in fp32 and rounded once, never in the type of the result.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(attribute, static_cast<uint32_t>(problem.desc.alignment));
  }
  if (!calls.ok()) return {};
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(count));
  int found = 0;
  const cublasStatus_t status =
      calls.lt.heuristic(handle, operation, problem.a.get(), problem.b.get(), problem.c.get(), problem.d.get(),
                         preference, count, results.data(), &found);
  calls.Ok("cublasLtMatmulAlgoGetHeuristic",
           found == 0 && status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status);
  std::vector<AlgorithmBlob> algorithms;
  for (int i = 0; calls.ok() && i < found; ++i) {
    const auto& result = results[static_cast<size_t>(i)];
    // The first is what a heuristic asked for one would give; others have to be usable.
    if (i == 0 || result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(BlobOf(result.algo));
  }
  for (const OwnKernel& kernel : OwnKernels()) {
    if (calls.ok() && count > 1 && kernel.why_not(problem.desc).empty()) algorithms.push_back(BlobOf(kernel.algorithm));
  }
  return algorithms;
}

bool CanRun(Calls& calls, cublasLtHandle_t handle, const Problem& problem, cublasLtMatmulDesc_t operation,
            const AlgorithmBlob& algorithm) {
  if (OwnOf(algorithm).has_value()) return OwnKernelOf(algorithm, problem.desc) != nullptr;
  cublasLtMatmulHeuristicResult_t result{};
  const cublasLtMatmulAlgo_t theirs = TheirsOf(algorithm);
  const cublasStatus_t status = calls.lt.algo_check(handle, operation, problem.a.get(), problem.b.get(),
                                                    problem.c.get(), problem.d.get(), &theirs, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WorkspaceBytes(problem.desc);
}

}  // namespace te_jax::gemm
