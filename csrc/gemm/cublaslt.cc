#include "csrc/gemm/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace te_jax::gemm {
namespace {

#define TE_JAX_STRINGIFY_VALUE(x) #x
#define TE_JAX_STRINGIFY(x) TE_JAX_STRINGIFY_VALUE(x)
// Types and enumerators are those of this major version's headers.
constexpr char kLibrary[] = "libcublasLt.so." TE_JAX_STRINGIFY(CUBLAS_VER_MAJOR);

// .../site-packages/te_jax/_native/<this module> -> .../site-packages/nvidia/cu13/lib/<library>
std::string PathInSitePackages() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&PathInSitePackages), &info) == 0 || info.dli_fname == nullptr)
    return kLibrary;
  std::string path = info.dli_fname;
  for (int level = 0; level < 3; ++level) path.erase(std::min(path.size(), path.rfind('/')));
  return path + "/nvidia/cu" TE_JAX_STRINGIFY(CUBLAS_VER_MAJOR) "/lib/" + kLibrary;
}

void* Open(std::string* error) {
  if (void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) return library;
  if (void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) return library;
  *error = dlerror();
  if (void* library = dlopen(PathInSitePackages().c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  *error += std::string("; ") + dlerror();
  return nullptr;
}

template <class Function>
void Resolve(void* library, const char* name, Function* function, std::string* error) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && error->empty()) *error = std::string(kLibrary) + " has no " + name;
}

CublasLt Load() {
  CublasLt lt;
  std::string open_error;
  void* library = Open(&open_error);
  if (library == nullptr) {
    lt.error = "cuBLASLt can't be loaded: " + open_error;
    return lt;
  }
#define TE_JAX_RESOLVE(member, name) Resolve(library, #name, &lt.member, &lt.error)
  TE_JAX_RESOLVE(get_version, cublasLtGetVersion);
  TE_JAX_RESOLVE(status_string, cublasLtGetStatusString);
  TE_JAX_RESOLVE(create, cublasLtCreate);
  TE_JAX_RESOLVE(matmul, cublasLtMatmul);
  TE_JAX_RESOLVE(desc_create, cublasLtMatmulDescCreate);
  TE_JAX_RESOLVE(desc_destroy, cublasLtMatmulDescDestroy);
  TE_JAX_RESOLVE(desc_set, cublasLtMatmulDescSetAttribute);
  TE_JAX_RESOLVE(layout_create, cublasLtMatrixLayoutCreate);
  TE_JAX_RESOLVE(layout_destroy, cublasLtMatrixLayoutDestroy);
  TE_JAX_RESOLVE(preference_create, cublasLtMatmulPreferenceCreate);
  TE_JAX_RESOLVE(preference_destroy, cublasLtMatmulPreferenceDestroy);
  TE_JAX_RESOLVE(preference_set, cublasLtMatmulPreferenceSetAttribute);
  TE_JAX_RESOLVE(heuristic, cublasLtMatmulAlgoGetHeuristic);
  TE_JAX_RESOLVE(algo_check, cublasLtMatmulAlgoCheck);
#undef TE_JAX_RESOLVE
  Dl_info info;
  if (lt.error.empty() && dladdr(reinterpret_cast<const void*>(lt.create), &info) != 0) lt.path = info.dli_fname;
  return lt;
}

}  // namespace

const CublasLt& LoadedCublasLt() {
  static const CublasLt lt = Load();
  return lt;
}

cublasLtHandle_t HandleOfDevice(int device, std::string* error) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;  // never destroyed: the CUDA context may be gone before statics are
  const CublasLt& lt = LoadedCublasLt();
  if (!lt.error.empty()) {
    *error = lt.error;
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) {
    if (const cublasStatus_t status = lt.create(&handle); status != CUBLAS_STATUS_SUCCESS) {
      *error = std::string("cublasLtCreate: ") + lt.status_string(status);
    }
  }
  return handle;
}

}  // namespace te_jax::gemm
