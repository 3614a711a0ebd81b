// One GEMM as the objects that cuBLASLt wants, which destroy themselves.
#ifndef TE_JAX_GEMM_OPERATION_H_
#define TE_JAX_GEMM_OPERATION_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <type_traits>

#include "csrc/core/args.h"
#include "csrc/gemm/algorithm_table.h"
#include "csrc/gemm/cublaslt.h"
#include "csrc/gemm/gemm.h"
#include "csrc/gemm/plan.h"

namespace te_jax::gemm {

template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

// Calls cuBLASLt and CUDA, and keeps the first failure.
class Calls {
 public:
  Calls() : lt(LoadedCublasLt()) {}

  bool Ok(const char* what, cublasStatus_t status);
  bool Ok(const char* what, cudaError_t error);
  bool ok() const { return status_.code == Status::kOk; }
  const Status& status() const { return status_; }

  const CublasLt& lt;

 private:
  Status status_;
};

// What is the same for every call with one description.
struct Problem {
  Problem(Calls& calls, const GemmDesc& desc, const GemmPlan& plan);

  GemmDesc desc;
  GemmPlan plan;
  Owned<cublasLtMatrixLayout_t> a, b, c, d;
};

// The operation with the pointers of `args`.
Owned<cublasLtMatmulDesc_t> MakeOperation(Calls& calls, const GemmPlan& plan, const GemmArgs& args);

// Gives an operation of the same description other pointers.
void SetPointers(Calls& calls, cublasLtMatmulDesc_t operation, const GemmPlan& plan, const GemmArgs& args);

// What an algorithm may use of the workspace.
inline size_t WorkspaceBytes(const GemmDesc& desc) { return kWorkspaceBytes - ScalePadding(desc).bytes(); }

// cuBLASLt's description of an algorithm, and back.
AlgorithmBlob BlobOf(const cublasLtMatmulAlgo_t& algorithm);
cublasLtMatmulAlgo_t TheirsOf(const AlgorithmBlob& algorithm);

// Queues one multiplication by an algorithm of cuBLASLt. args.amax has to be 0.
void Multiply(Calls& calls, cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const Problem& problem,
              const GemmArgs& args, const AlgorithmBlob& algorithm, void* workspace, cudaStream_t stream);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_OPERATION_H_
