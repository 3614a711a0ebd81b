// cuBLASLt, loaded on first use. The module is not linked to it, so it loads on machines that have no CUDA libraries
// (CI compiles programs for a GPU there).
#ifndef TE_JAX_GEMM_CUBLASLT_H_
#define TE_JAX_GEMM_CUBLASLT_H_

#include <cublasLt.h>

#include <string>

namespace te_jax::gemm {

struct CublasLt {
  std::string error;  // empty if the library was loaded; otherwise nothing below may be called
  std::string path;   // of the loaded library

  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) algo_check = nullptr;
};

// Loads the library once. Places, in this order: the copy that is in the process already (JAX's CUDA plugin loads one,
// and two copies would be two sets of kernels in device memory); the loader's search path; the nvidia-cublas wheel in
// the site-packages directory that holds te_jax.
const CublasLt& LoadedCublasLt();

// The handle of the current device, created on first use. nullptr and `error` set if that fails.
cublasLtHandle_t HandleOfDevice(int device, std::string* error);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_CUBLASLT_H_
