#include "csrc/gemm/gemm.h"

#include <memory>
#include <mutex>
#include <unordered_map>

#include "csrc/gemm/cublaslt.h"
#include "csrc/gemm/plan.h"

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

// A cuBLASLt object that destroys itself.
template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

// Calls cuBLASLt until the first failure, which it keeps.
class Calls {
 public:
  Calls() : lt(LoadedCublasLt()) {}

  bool Ok(const char* what, cublasStatus_t status) {
    if (status_.code == Status::kOk && status != CUBLAS_STATUS_SUCCESS) {
      const bool unsupported = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
      status_ = {unsupported ? Status::kUnsupported : Status::kInternal,
                 std::string(what) + ": " + lt.status_string(status)};
    }
    return status_.code == Status::kOk;
  }
  const Status& status() const { return status_; }

  Owned<cublasLtMatrixLayout_t> Layout(const Matrix& matrix) {
    cublasLtMatrixLayout_t layout = nullptr;
    Ok("cublasLtMatrixLayoutCreate",
       lt.layout_create(&layout, CudaType(matrix.dtype), matrix.rows, matrix.cols, matrix.ld));
    return {layout, lt.layout_destroy};
  }

  template <class T>
  void Set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
    Ok("cublasLtMatmulDescSetAttribute", lt.desc_set(desc, attribute, &value, sizeof value));
  }

  const CublasLt& lt;

 private:
  Status status_;
};

// The operation with the pointers of one call: made for each call, since calls on several threads share the rest.
Owned<cublasLtMatmulDesc_t> MakeOperation(Calls& calls, const GemmPlan& plan, const GemmArgs& args) {
  cublasLtMatmulDesc_t desc = nullptr;
  if (!calls.Ok("cublasLtMatmulDescCreate", calls.lt.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F))) {
    return {nullptr, calls.lt.desc_destroy};
  }
  Owned<cublasLtMatmulDesc_t> owned(desc, calls.lt.desc_destroy);
  calls.Set(desc, CUBLASLT_MATMUL_DESC_TRANSA, plan.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  calls.Set(desc, CUBLASLT_MATMUL_DESC_TRANSB, plan.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (plan.fp8) {
    calls.Set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(args.fast_accumulation));
    calls.Set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, args.rhs_scale_inv);
    calls.Set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.lhs_scale_inv);
    if (args.out_scale != nullptr) calls.Set(desc, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, args.out_scale);
    if (args.amax != nullptr) calls.Set(desc, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, args.amax);
  }
  if (args.bias != nullptr) {
    calls.Set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    calls.Set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
    calls.Set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CudaType(args.bias_dtype));
  }
  return owned;
}

// What stays the same for every call with one description on one device.
struct Prepared {
  GemmPlan plan;
  Owned<cublasLtMatrixLayout_t> a, b, c, d;
  cublasLtMatmulAlgo_t algorithm;
};

cublasLtMatmulAlgo_t ChooseAlgorithm(Calls& calls, cublasLtHandle_t handle, const GemmDesc& desc, const Prepared& gemm,
                                     cublasLtMatmulDesc_t operation) {
  cublasLtMatmulHeuristicResult_t result{};
  cublasLtMatmulPreference_t preference = nullptr;
  if (!calls.Ok("cublasLtMatmulPreferenceCreate", calls.lt.preference_create(&preference))) return result.algo;
  const Owned<cublasLtMatmulPreference_t> owned(preference, calls.lt.preference_destroy);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    calls.Ok("cublasLtMatmulPreferenceSetAttribute",
             calls.lt.preference_set(preference, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // A split contraction is added up in fp32 and rounded once, never in the type of the result.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(attribute, static_cast<uint32_t>(desc.alignment));
  }
  if (calls.status().code != Status::kOk) return result.algo;
  int found = 0;
  const cublasStatus_t status = calls.lt.heuristic(handle, operation, gemm.a.get(), gemm.b.get(), gemm.c.get(),
                                                   gemm.d.get(), preference, 1, &result, &found);
  calls.Ok("cublasLtMatmulAlgoGetHeuristic",
           found == 0 && status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status);
  return result.algo;
}

struct Key {
  int device;
  GemmDesc desc;
  bool operator==(const Key& other) const { return device == other.device && desc == other.desc; }
};
struct KeyHash {
  size_t operator()(const Key& key) const { return HashOf(key.desc) * 31 + static_cast<size_t>(key.device); }
};

// Entries are never removed, so that a reference to one stays good without the lock.
const Prepared* Prepare(Calls& calls, cublasLtHandle_t handle, const Key& key, const GemmPlan& plan,
                        const GemmArgs& args) {
  static std::mutex mutex;
  static std::unordered_map<Key, std::unique_ptr<const Prepared>, KeyHash> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = cache.find(key); found != cache.end()) return found->second.get();
  auto made = std::make_unique<Prepared>(Prepared{plan, calls.Layout(plan.a), calls.Layout(plan.b),
                                                  calls.Layout(plan.c), calls.Layout(plan.d), cublasLtMatmulAlgo_t{}});
  const auto operation = MakeOperation(calls, plan, args);
  if (calls.status().code != Status::kOk) return nullptr;
  made->algorithm = ChooseAlgorithm(calls, handle, key.desc, *made, operation.get());
  if (calls.status().code != Status::kOk) return nullptr;
  return cache.emplace(key, std::move(made)).first->second.get();
}

}  // namespace

Status Launch(const GemmArgs& args, void* workspace, cudaStream_t stream) {
  const GemmDesc desc = DescOf(args);
  const auto planned = MakePlan(desc);
  if (const auto* reason = std::get_if<std::string>(&planned)) return {Status::kUnsupported, *reason};

  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return {Status::kInternal, std::string("cudaGetDevice: ") + cudaGetErrorString(error)};
  }
  std::string load_error;
  cublasLtHandle_t handle = HandleOfDevice(device, &load_error);
  if (handle == nullptr) return {Status::kInternal, load_error};

  Calls calls;
  const auto failed = [&] { return Status{calls.status().code, calls.status().message + " (" + ToString(desc) + ")"}; };
  const Prepared* gemm = Prepare(calls, handle, {device, desc}, std::get<GemmPlan>(planned), args);
  if (gemm == nullptr) return failed();
  const auto operation = MakeOperation(calls, gemm->plan, args);
  if (calls.status().code != Status::kOk) return failed();
  if (args.amax != nullptr) {  // the epilogue takes a maximum with what is there
    if (const cudaError_t error = cudaMemsetAsync(args.amax, 0, sizeof(float), stream); error != cudaSuccess) {
      return {Status::kInternal, std::string("cudaMemsetAsync: ") + cudaGetErrorString(error)};
    }
  }
  // Not read where beta is 0; given all the same where it has the type of the result, as cuBLASLt wants it.
  const void* c = desc.accumulates ? args.c : gemm->plan.c.dtype == gemm->plan.d.dtype ? args.out : nullptr;
  calls.Ok("cublasLtMatmul", calls.lt.matmul(handle, operation.get(), &args.alpha, args.rhs, gemm->a.get(), args.lhs,
                                             gemm->b.get(), &args.beta, c, gemm->c.get(), args.out, gemm->d.get(),
                                             &gemm->algorithm, workspace, kWorkspaceBytes, stream));
  return calls.status().code == Status::kOk ? Status{} : failed();
}

}  // namespace te_jax::gemm
