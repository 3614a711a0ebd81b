// The custom calls on CPU: decode and check, then run the host kernel.
#include "csrc/ffi/cpu/handlers.h"

#include <limits>

#include "csrc/cpu/float_env.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ffi/activation.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/dequantize.h"
#include "csrc/ffi/gemm.h"
#include "csrc/ffi/norm.h"
#include "csrc/ffi/norm_grad.h"
#include "csrc/ffi/quantize.h"
#include "csrc/ffi/state.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

template <auto kKernel, typename Args>
ffi::Error Run(const Args& args) {
  const cpu::KeepSubnormals keep_subnormals;
  if (!kKernel(args)) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "te_jax: no memory for scratch");
  return ffi::Error::Success();
}

template <typename Spec, auto kDecode, auto kKernel>
ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, Spec spec) {
  const auto decoded = kDecode(args, rets, spec);
  return decoded.has_error() ? decoded.error() : Run<kKernel>(*decoded);
}

ffi::Error HandleGemm(ffi::RemainingArgs args, ffi::RemainingRets rets, GemmSpec spec) {
  const auto decoded = DecodeGemm(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  if (!cpu::HasSgemm()) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "te_jax gemm: no BLAS was given (set_sgemm)");
  }
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  if (decoded->m > kMax || decoded->n > kMax || decoded->k > kMax) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "te_jax gemm: expected m, n and k below 2^31 on CPU");
  }
  return Run<cpu::Gemm>(*decoded);
}

template <typename Spec>
auto Signature() {
  return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<Spec>(kSpec);
}

}  // namespace
}  // namespace te_jax

// The function comes last: its template arguments have commas.
#define TE_JAX_DEFINE_HANDLER(symbol, Spec, ...) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, (__VA_ARGS__), te_jax::Signature<te_jax::Spec>())

TE_JAX_DEFINE_HANDLER(te_jax_cpu_quantize, QuantizeSpec,
                      te_jax::Handle<te_jax::QuantizeSpec, te_jax::DecodeQuantize, te_jax::cpu::Quantize>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_dequantize, DequantizeSpec,
                      te_jax::Handle<te_jax::DequantizeSpec, te_jax::DecodeDequantize, te_jax::cpu::Dequantize>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_norm, NormSpec,
                      te_jax::Handle<te_jax::NormSpec, te_jax::DecodeNorm, te_jax::cpu::Norm>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_norm_grad, NormGradSpec,
                      te_jax::Handle<te_jax::NormGradSpec, te_jax::DecodeNormGrad, te_jax::cpu::NormGrad>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_activation, ActivationSpec,
                      te_jax::Handle<te_jax::ActivationSpec, te_jax::DecodeActivation, te_jax::cpu::Activation>);
TE_JAX_DEFINE_HANDLER(
    te_jax_cpu_activation_grad, ActivationGradSpec,
    te_jax::Handle<te_jax::ActivationGradSpec, te_jax::DecodeActivationGrad, te_jax::cpu::ActivationGrad>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_gemm, GemmSpec, te_jax::HandleGemm);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_scale_read, ScaleReadSpec,
                      te_jax::Handle<te_jax::ScaleReadSpec, te_jax::DecodeScaleRead, te_jax::cpu::ScaleRead>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_scale_write, ScaleWriteSpec,
                      te_jax::Handle<te_jax::ScaleWriteSpec, te_jax::DecodeScaleWrite, te_jax::cpu::ScaleWrite>);
