// cuBLASLt's products, for a comparison: libcublasLt.so.13 is loaded at run time.
#ifndef TE_JAX_BENCHMARKS_NATIVE_CUBLASLT_CUH_
#define TE_JAX_BENCHMARKS_NATIVE_CUBLASLT_CUH_

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "csrc/core/args.h"

#define CHECK_CUDA(call)                                                                        \
  do {                                                                                          \
    const cudaError_t error_ = (call);                                                          \
    if (error_ != cudaSuccess) {                                                                \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));      \
      std::exit(2);                                                                             \
    }                                                                                           \
  } while (0)
#define CHECK_LT(call)                                                             \
  do {                                                                             \
    const int status_ = (call);                                                    \
    if (status_ != 0) {                                                            \
      std::fprintf(stderr, "%s:%d: cuBLASLt status %d\n", __FILE__, __LINE__, status_); \
      std::exit(2);                                                                \
    }                                                                              \
  } while (0)

namespace te_jax::kernels {

class CublasLt {
 public:
  CublasLt() {
    void* library = dlopen("libcublasLt.so.13", RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      std::exit(2);
    }
#define LOAD(name) name##_ = reinterpret_cast<decltype(&::name)>(dlsym(library, #name))
    LOAD(cublasLtCreate), LOAD(cublasLtMatmul), LOAD(cublasLtMatmulDescCreate), LOAD(cublasLtMatmulDescSetAttribute);
    LOAD(cublasLtMatrixLayoutCreate), LOAD(cublasLtMatmulPreferenceCreate), LOAD(cublasLtMatmulPreferenceSetAttribute);
    LOAD(cublasLtMatmulAlgoGetHeuristic);
#undef LOAD
    CHECK_LT(cublasLtCreate_(&handle_));
    CHECK_CUDA(cudaMalloc(&workspace_, kWorkspace));
  }

  // Column-major there: out^T = (b^T)^T * a^T. FP8: `block`: scales of 128 elements; else scalars (the first of
  // each), with or without fast accumulation.
  struct Plan {
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t a, b, out;
    std::vector<cublasLtMatmulAlgo_t> algorithms;
  };
  Plan Prepare(const GemmArgs& p, bool block, bool fast) {
    Plan plan{};
    CHECK_LT(cublasLtMatmulDescCreate_(&plan.description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const auto set = [&](cublasLtMatmulDescAttributes_t which, auto value) {
      CHECK_LT(cublasLtMatmulDescSetAttribute_(plan.description, which, &value, sizeof value));
    };
    const bool fp8 = p.lhs_dtype != DType::kBF16;
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.rhs_contract_first ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.lhs_contract_first ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (fp8) {
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast));
      SetScales(plan, p);
    }
    if (block) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
          p.rhs_scaling == Scaling::kBlock1x128 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                                : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
    }
    const auto layout = [&](cublasLtMatrixLayout_t* result, DType dtype, bool contract_first, int64_t rows) {
      const int64_t inner = contract_first ? rows : p.k, outer = contract_first ? p.k : rows;
      CHECK_LT(cublasLtMatrixLayoutCreate_(result, TypeOf(dtype), inner, outer, inner));
    };
    layout(&plan.a, p.rhs_dtype, p.rhs_contract_first, p.n);
    layout(&plan.b, p.lhs_dtype, p.lhs_contract_first, p.m);
    const cudaDataType_t out = p.out_dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
    CHECK_LT(cublasLtMatrixLayoutCreate_(&plan.out, out, p.n, p.m, p.n));
    cublasLtMatmulPreference_t preference;
    CHECK_LT(cublasLtMatmulPreferenceCreate_(&preference));
    const size_t workspace = kWorkspace;
    CHECK_LT(cublasLtMatmulPreferenceSetAttribute_(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                   sizeof workspace));
    cublasLtMatmulHeuristicResult_t results[8];
    int found = 0;
    cublasLtMatmulAlgoGetHeuristic_(handle_, plan.description, plan.a, plan.b, plan.out, plan.out, preference, 8,
                                    results, &found);
    for (int i = 0; i < found; ++i) plan.algorithms.push_back(results[i].algo);
    return plan;
  }
  // With beta: added to what is in out.
  void Run(const Plan& plan, int algorithm, const GemmArgs& p) {
    if (p.lhs_dtype != DType::kBF16) SetScales(plan, p);
    const float one = 1;
    CHECK_LT(cublasLtMatmul_(handle_, plan.description, &one, p.rhs, plan.a, p.lhs, plan.b, &p.beta, p.out,
                             plan.out, p.out, plan.out, &plan.algorithms[algorithm], workspace_, kWorkspace, nullptr));
  }

 private:
  static cudaDataType_t TypeOf(DType dtype) {
    return dtype == DType::kBF16 ? CUDA_R_16BF : dtype == DType::kE5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
  }
  void SetScales(const Plan& plan, const GemmArgs& p) {
    const void *a = p.rhs_scale_inv, *b = p.lhs_scale_inv;
    CHECK_LT(cublasLtMatmulDescSetAttribute_(plan.description, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a, sizeof a));
    CHECK_LT(cublasLtMatmulDescSetAttribute_(plan.description, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b, sizeof b));
  }

  static constexpr size_t kWorkspace = 64 << 20;
#define DECLARE(name) decltype(&::name) name##_ = nullptr
  DECLARE(cublasLtCreate);
  DECLARE(cublasLtMatmul);
  DECLARE(cublasLtMatmulDescCreate);
  DECLARE(cublasLtMatmulDescSetAttribute);
  DECLARE(cublasLtMatrixLayoutCreate);
  DECLARE(cublasLtMatmulPreferenceCreate);
  DECLARE(cublasLtMatmulPreferenceSetAttribute);
  DECLARE(cublasLtMatmulAlgoGetHeuristic);
#undef DECLARE
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_BENCHMARKS_NATIVE_CUBLASLT_CUH_
