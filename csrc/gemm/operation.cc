#include "csrc/gemm/operation.h"

#include <cstring>

namespace te_jax::gemm {
namespace {

cudaDataType_t CudaType(DType dtype) {
  switch (dtype) {
    case DType::kF32: return CUDA_R_32F;
    case DType::kBF16: return CUDA_R_16BF;
    case DType::kF16: return CUDA_R_16F;
    case DType::kE4M3: return CUDA_R_8F_E4M3;
    case DType::kE5M2: return CUDA_R_8F_E5M2;
  }
  return CUDA_R_32F;
}

int32_t ScaleMode(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case Scaling::kBlock1x128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Scaling::kBlock128x128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

Owned<cublasLtMatrixLayout_t> Layout(Calls& calls, const Matrix& matrix) {
  cublasLtMatrixLayout_t layout = nullptr;
  calls.Ok("cublasLtMatrixLayoutCreate",
           calls.lt.layout_create(&layout, CudaType(matrix.dtype), static_cast<uint64_t>(matrix.rows),
                                  static_cast<uint64_t>(matrix.cols), matrix.ld));
  return {layout, calls.lt.layout_destroy};
}

template <class T>
void Set(Calls& calls, cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  calls.Ok("cublasLtMatmulDescSetAttribute", calls.lt.desc_set(desc, attribute, &value, sizeof value));
}

}  // namespace

bool Calls::Ok(const char* what, cublasStatus_t status) {
  if (ok() && status != CUBLAS_STATUS_SUCCESS) {
    const bool unsupported = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    status_ = {unsupported ? Status::kUnsupported : Status::kInternal,
               std::string(what) + ": " + lt.status_string(status)};
  }
  return ok();
}

bool Calls::Ok(const char* what, cudaError_t error) {
  if (ok() && error != cudaSuccess) {
    status_ = {Status::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
  }
  return ok();
}

Problem::Problem(Calls& calls, const GemmDesc& desc, const GemmPlan& plan)
    : desc(desc),
      plan(plan),
      a(Layout(calls, plan.a)),
      b(Layout(calls, plan.b)),
      c(Layout(calls, plan.c)),
      d(Layout(calls, plan.d)) {}

Owned<cublasLtMatmulDesc_t> MakeOperation(Calls& calls, const GemmPlan& plan, const GemmArgs& args) {
  cublasLtMatmulDesc_t desc = nullptr;
  if (!calls.Ok("cublasLtMatmulDescCreate", calls.lt.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F))) {
    return {nullptr, calls.lt.desc_destroy};
  }
  Owned<cublasLtMatmulDesc_t> owned(desc, calls.lt.desc_destroy);
  Set(calls, desc, CUBLASLT_MATMUL_DESC_TRANSA, plan.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  Set(calls, desc, CUBLASLT_MATMUL_DESC_TRANSB, plan.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (plan.fp8) Set(calls, desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(args.fast_accumulation));
  if (args.lhs_scaling != Scaling::kTensor) {
    Set(calls, desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, ScaleMode(args.rhs_scaling));
    Set(calls, desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, ScaleMode(args.lhs_scaling));
  }
  if (args.bias != nullptr) {
    Set(calls, desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    Set(calls, desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CudaType(args.bias_dtype));
  }
  SetPointers(calls, desc, plan, args);
  return owned;
}

void SetPointers(Calls& calls, cublasLtMatmulDesc_t operation, const GemmPlan& plan, const GemmArgs& args) {
  if (plan.fp8) {
    Set(calls, operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, args.rhs_scale_inv);
    Set(calls, operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.lhs_scale_inv);
    if (args.out_scale != nullptr) Set(calls, operation, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, args.out_scale);
    if (args.amax != nullptr) Set(calls, operation, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, args.amax);
  }
  if (args.bias != nullptr) Set(calls, operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
}

AlgorithmBlob BlobOf(const cublasLtMatmulAlgo_t& algorithm) {
  AlgorithmBlob blob;
  static_assert(sizeof algorithm == sizeof blob);
  std::memcpy(blob.data(), &algorithm, sizeof algorithm);
  return blob;
}

cublasLtMatmulAlgo_t TheirsOf(const AlgorithmBlob& algorithm) {
  cublasLtMatmulAlgo_t theirs{};
  std::memcpy(&theirs, algorithm.data(), sizeof theirs);
  return theirs;
}

void Multiply(Calls& calls, cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const Problem& problem,
              const GemmArgs& args, const AlgorithmBlob& algorithm, void* workspace, cudaStream_t stream) {
  // Not read where beta is 0; given all the same where it has the type of the result, as cuBLASLt wants it.
  const bool like_out = problem.plan.c.dtype == problem.plan.d.dtype;
  const void* c = problem.desc.accumulates ? args.c : like_out ? args.out : nullptr;
  const cublasLtMatmulAlgo_t theirs = TheirsOf(algorithm);
  calls.Ok("cublasLtMatmul",
           calls.lt.matmul(handle, operation, &args.alpha, args.rhs, problem.a.get(), args.lhs, problem.b.get(),
                           &args.beta, c, problem.c.get(), args.out, problem.d.get(), &theirs, workspace,
                           WorkspaceBytes(problem.desc), stream));
}

}  // namespace te_jax::gemm
