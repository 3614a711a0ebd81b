// The custom calls on CUDA: decode and check, take scratch memory from XLA, launch.
#include "csrc/ffi/cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <string>

#include "csrc/ffi/activation.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/dequantize.h"
#include "csrc/ffi/gemm.h"
#include "csrc/ffi/norm.h"
#include "csrc/ffi/quantize.h"
#include "csrc/gemm/gemm.h"
#include "csrc/kernels/activation.h"
#include "csrc/kernels/activation_grad.h"
#include "csrc/kernels/dequantize.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/quantize.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kScratchAlignment = 16;  // XLA refuses more; cuBLASLt and the kernels need no more

template <typename Spec>
constexpr char kOp[] = "te_jax";
template <>
constexpr char kOp<QuantizeSpec>[] = "te_jax quantize";
template <>
constexpr char kOp<DequantizeSpec>[] = "te_jax dequantize";
template <>
constexpr char kOp<NormSpec>[] = "te_jax norm";
template <>
constexpr char kOp<ActivationSpec>[] = "te_jax activation";
template <>
constexpr char kOp<ActivationGradSpec>[] = "te_jax activation_grad";
template <>
constexpr char kOp<GemmSpec>[] = "te_jax gemm";

ffi::Error FromCuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  const bool other_gpu = error == cudaErrorNoKernelImageForDevice;
  return ffi::Error(
      other_gpu ? ffi::ErrorCode::kUnimplemented : ffi::ErrorCode::kInternal,
      std::string(op) + ": " + cudaGetErrorString(error) + (other_gpu ? " (it needs compute capability 9.0)" : ""));
}

ffi::Error NoScratch(const char* op, size_t bytes) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    std::string(op) + ": no device memory for " + std::to_string(bytes) + " bytes of scratch");
}

// The passes that quantize: all need scratch memory.
template <typename Spec, auto kDecode, auto kBytes, auto kLaunch>
ffi::Error HandlePass(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, Spec spec) {
  const auto decoded = kDecode(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const size_t bytes = kBytes(*decoded);
  const std::optional<void*> workspace = scratch.Allocate(bytes, kScratchAlignment);
  if (!workspace.has_value()) return NoScratch(kOp<Spec>, bytes);
  return FromCuda(kOp<Spec>, kLaunch(*decoded, *workspace, stream));
}

ffi::Error HandleDequantize(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            DequantizeSpec spec) {
  const auto decoded = DecodeDequantize(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  return FromCuda(kOp<DequantizeSpec>, kernels::LaunchDequantize(*decoded, stream));
}

ffi::Error HandleGemm(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, GemmSpec spec) {
  const auto decoded = DecodeGemm(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const std::optional<void*> workspace = scratch.Allocate(gemm::kWorkspaceBytes, kScratchAlignment);
  if (!workspace.has_value()) return NoScratch(kOp<GemmSpec>, gemm::kWorkspaceBytes);
  const gemm::Status status = gemm::Launch(*decoded, *workspace, stream);
  if (status.code == gemm::Status::kOk) return ffi::Error::Success();
  const auto code =
      status.code == gemm::Status::kUnsupported ? ffi::ErrorCode::kUnimplemented : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string(kOp<GemmSpec>) + ": " + status.message);
}

template <typename Spec>
auto PassSignature() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<Spec>(kSpec);
}

auto DequantizeSignature() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attr<DequantizeSpec>(
      kSpec);
}

}  // namespace
}  // namespace te_jax

// The function comes last: its template arguments have commas.
#define TE_JAX_DEFINE_PASS(symbol, Spec, ...)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, (te_jax::HandlePass<te_jax::Spec, __VA_ARGS__>), \
                                te_jax::PassSignature<te_jax::Spec>())

TE_JAX_DEFINE_PASS(te_jax_cuda_quantize, QuantizeSpec, te_jax::DecodeQuantize, te_jax::kernels::QuantizeWorkspaceBytes,
                   te_jax::kernels::LaunchQuantize);
TE_JAX_DEFINE_PASS(te_jax_cuda_norm, NormSpec, te_jax::DecodeNorm, te_jax::kernels::NormWorkspaceBytes,
                   te_jax::kernels::LaunchNorm);
TE_JAX_DEFINE_PASS(te_jax_cuda_activation, ActivationSpec, te_jax::DecodeActivation,
                   te_jax::kernels::ActivationWorkspaceBytes, te_jax::kernels::LaunchActivation);
TE_JAX_DEFINE_PASS(te_jax_cuda_activation_grad, ActivationGradSpec, te_jax::DecodeActivationGrad,
                   te_jax::kernels::ActivationGradWorkspaceBytes, te_jax::kernels::LaunchActivationGrad);
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cuda_dequantize, te_jax::HandleDequantize, te_jax::DequantizeSignature());
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cuda_gemm, te_jax::HandleGemm, te_jax::PassSignature<te_jax::GemmSpec>());
