// The custom calls on CUDA: decode and check, launch. They allocate nothing and wait for nothing: XLA may capture them
// in a command buffer (a CUDA graph). Scratch memory is the first result (Definition.workspace in te_jax/primitives).
#include "csrc/ffi/cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>

#include "csrc/ffi/activation.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/dequantize.h"
#include "csrc/ffi/gemm.h"
#include "csrc/ffi/grouped_gemm.h"
#include "csrc/ffi/norm.h"
#include "csrc/ffi/norm_grad.h"
#include "csrc/ffi/quantize.h"
#include "csrc/ffi/state.h"
#include "csrc/gemm/gemm.h"
#include "csrc/kernels/activation.h"
#include "csrc/kernels/activation_grad.h"
#include "csrc/kernels/dequantize.h"
#include "csrc/kernels/grouped_gemm.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/norm_grad.h"
#include "csrc/kernels/quantize.h"
#include "csrc/kernels/state.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

bool command_buffers = true;

template <typename Spec>
constexpr char kOp[] = "te_jax";
template <>
constexpr char kOp<QuantizeSpec>[] = "te_jax quantize";
template <>
constexpr char kOp<DequantizeSpec>[] = "te_jax dequantize";
template <>
constexpr char kOp<NormSpec>[] = "te_jax norm";
template <>
constexpr char kOp<NormGradSpec>[] = "te_jax norm_grad";
template <>
constexpr char kOp<ActivationSpec>[] = "te_jax activation";
template <>
constexpr char kOp<ActivationGradSpec>[] = "te_jax activation_grad";
template <>
constexpr char kOp<GemmSpec>[] = "te_jax gemm";
template <>
constexpr char kOp<GroupedGemmSpec>[] = "te_jax grouped_gemm";
template <>
constexpr char kOp<GroupedWgradSpec>[] = "te_jax grouped_wgrad";
template <>
constexpr char kOp<ScaleReadSpec>[] = "te_jax scale_read";
template <>
constexpr char kOp<ScaleWriteSpec>[] = "te_jax scale_write";

ffi::Error FromCuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  const bool other_gpu = error == cudaErrorNoKernelImageForDevice;
  return ffi::Error(
      other_gpu ? ffi::ErrorCode::kUnimplemented : ffi::ErrorCode::kInternal,
      std::string(op) + ": " + cudaGetErrorString(error) + (other_gpu ? " (it needs compute capability 9.0)" : ""));
}

// The memory of `buffer`, which has to have `bytes` at least.
ffi::ErrorOr<void*> Workspace(const char* op, ffi::Result<ffi::AnyBuffer> buffer, size_t bytes) {
  if (buffer->size_bytes() >= bytes) return buffer->untyped_data();
  return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(op) + ": workspace (the first result): expected " +
                                                     std::to_string(bytes) + " bytes, got " +
                                                     std::to_string(buffer->size_bytes())));
}

template <typename Spec, auto kDecode, auto kBytes, auto kLaunch>
ffi::Error HandlePass(cudaStream_t stream, ffi::Result<ffi::AnyBuffer> memory, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, Spec spec) {
  const auto decoded = kDecode(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const auto workspace = Workspace(kOp<Spec>, memory, kBytes(*decoded));
  if (workspace.has_error()) return workspace.error();
  return FromCuda(kOp<Spec>, kLaunch(*decoded, *workspace, stream));
}

// What needs no scratch memory.
template <typename Spec, auto kDecode, auto kLaunch>
ffi::Error HandleSmall(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Spec spec) {
  const auto decoded = kDecode(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  return FromCuda(kOp<Spec>, kLaunch(*decoded, stream));
}

ffi::Error HandleGemm(cudaStream_t stream, ffi::Result<ffi::AnyBuffer> memory, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, GemmSpec spec) {
  const auto decoded = DecodeGemm(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const auto workspace = Workspace(kOp<GemmSpec>, memory, gemm::kWorkspaceBytes);
  if (workspace.has_error()) return workspace.error();
  const gemm::Status status = gemm::Launch(*decoded, *workspace, stream);
  if (status.code == gemm::Status::kOk) return ffi::Error::Success();
  const auto code =
      status.code == gemm::Status::kUnsupported ? ffi::ErrorCode::kUnimplemented : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string(kOp<GemmSpec>) + ": " + status.message);
}

template <typename Spec>
auto SignatureWithWorkspace() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ret<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<Spec>(kSpec);
}

template <typename Spec>
auto SmallSignature() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attr<Spec>(kSpec);
}

std::initializer_list<ffi::Traits> HandlerTraits() {
  static const std::initializer_list<ffi::Traits> captured = {ffi::Traits::kCmdBufferCompatible};
  return command_buffers ? captured : std::initializer_list<ffi::Traits>{};
}

}  // namespace

void SetCommandBuffers(bool enabled) { command_buffers = enabled; }

}  // namespace te_jax

// The function comes last: its template arguments have commas.
#define TE_JAX_DEFINE_PASS(symbol, Spec, ...)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, (te_jax::HandlePass<te_jax::Spec, __VA_ARGS__>), \
                                te_jax::SignatureWithWorkspace<te_jax::Spec>(), te_jax::HandlerTraits())
#define TE_JAX_DEFINE_SMALL(symbol, Spec, ...)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, (te_jax::HandleSmall<te_jax::Spec, __VA_ARGS__>), \
                                te_jax::SmallSignature<te_jax::Spec>(), te_jax::HandlerTraits())

TE_JAX_DEFINE_PASS(te_jax_cuda_quantize, QuantizeSpec, te_jax::DecodeQuantize, te_jax::kernels::QuantizeWorkspaceBytes,
                   te_jax::kernels::LaunchQuantize);
TE_JAX_DEFINE_PASS(te_jax_cuda_norm, NormSpec, te_jax::DecodeNorm, te_jax::kernels::NormWorkspaceBytes,
                   te_jax::kernels::LaunchNorm);
TE_JAX_DEFINE_PASS(te_jax_cuda_norm_grad, NormGradSpec, te_jax::DecodeNormGrad,
                   te_jax::kernels::NormGradWorkspaceBytes, te_jax::kernels::LaunchNormGrad);
TE_JAX_DEFINE_PASS(te_jax_cuda_activation, ActivationSpec, te_jax::DecodeActivation,
                   te_jax::kernels::ActivationWorkspaceBytes, te_jax::kernels::LaunchActivation);
TE_JAX_DEFINE_PASS(te_jax_cuda_activation_grad, ActivationGradSpec, te_jax::DecodeActivationGrad,
                   te_jax::kernels::ActivationGradWorkspaceBytes, te_jax::kernels::LaunchActivationGrad);
TE_JAX_DEFINE_SMALL(te_jax_cuda_dequantize, DequantizeSpec, te_jax::DecodeDequantize,
                    te_jax::kernels::LaunchDequantize);
TE_JAX_DEFINE_SMALL(te_jax_cuda_grouped_gemm, GroupedGemmSpec, te_jax::DecodeGroupedGemm,
                    te_jax::kernels::LaunchGroupedGemm);
TE_JAX_DEFINE_SMALL(te_jax_cuda_grouped_wgrad, GroupedWgradSpec, te_jax::DecodeGroupedWgrad,
                    te_jax::kernels::LaunchGroupedWgrad);
TE_JAX_DEFINE_SMALL(te_jax_cuda_scale_read, ScaleReadSpec, te_jax::DecodeScaleRead, te_jax::kernels::LaunchScaleRead);
TE_JAX_DEFINE_SMALL(te_jax_cuda_scale_write, ScaleWriteSpec, te_jax::DecodeScaleWrite,
                    te_jax::kernels::LaunchScaleWrite);
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cuda_gemm, te_jax::HandleGemm, te_jax::SignatureWithWorkspace<te_jax::GemmSpec>(),
                              te_jax::HandlerTraits());
