// The custom calls on CPU: decode and check, then run the host kernel.
#include "csrc/ffi/cpu/handlers.h"

#include <string>
#include <type_traits>

#include "csrc/cpu/float_env.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ffi/activation.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/cpu/blas.h"
#include "csrc/ffi/dequantize.h"
#include "csrc/ffi/gemm.h"
#include "csrc/ffi/grouped_gemm.h"
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

// Values that are an error: sizes of groups that can't be. On CUDA nobody but the device sees them.
ffi::Error CheckGroupSizes(const int32_t* sizes, int64_t groups, int64_t rows) {
  if (sizes == nullptr) return ffi::Error::Success();
  int64_t sum = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (sizes[g] < 0) {
      return ffi::Error::InvalidArgument("te_jax: group_sizes[" + std::to_string(g) +
                                         "]: expected 0 or more, got " + std::to_string(sizes[g]));
    }
    sum += sizes[g];
  }
  if (sum <= rows) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("te_jax: group_sizes: expected a sum of at most " + std::to_string(rows) +
                                     " (the rows), got " + std::to_string(sum));
}
template <typename Args>
ffi::Error CheckValues(const Args& args) {
  if constexpr (std::is_same_v<Args, GroupedGemmArgs> || std::is_same_v<Args, GroupedWgradArgs>) {
    return CheckGroupSizes(args.group_sizes, args.groups, args.tokens);
  } else if constexpr (std::is_same_v<Args, QuantizeArgs> || std::is_same_v<Args, ActivationArgs> ||
                       std::is_same_v<Args, ActivationGradArgs>) {
    return CheckGroupSizes(args.out.group_sizes, args.out.groups, args.rows);
  } else {
    return ffi::Error::Success();
  }
}

template <typename Spec, auto kDecode, auto kKernel>
ffi::Error Handle(ffi::RemainingArgs args, ffi::RemainingRets rets, Spec spec) {
  const auto decoded = kDecode(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const ffi::Error error = CheckValues(*decoded);
  return error.failure() ? error : Run<kKernel>(*decoded);
}

ffi::Error HandleGemm(ffi::RemainingArgs args, ffi::RemainingRets rets, GemmSpec spec) {
  const auto decoded = DecodeGemm(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const ffi::Error error = CheckBlas("gemm", {decoded->m, decoded->n, decoded->k});
  return error.failure() ? error : Run<cpu::Gemm>(*decoded);
}

ffi::Error HandleGroupedGemm(ffi::RemainingArgs args, ffi::RemainingRets rets, GroupedGemmSpec spec) {
  const auto decoded = DecodeGroupedGemm(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const ffi::Error error = CheckBlas("grouped_gemm", {decoded->tokens, decoded->n, decoded->k});
  if (error.failure()) return error;
  const ffi::Error values = CheckValues(*decoded);
  return values.failure() ? values : Run<cpu::GroupedGemm>(*decoded);
}

ffi::Error HandleGroupedWgrad(ffi::RemainingArgs args, ffi::RemainingRets rets, GroupedWgradSpec spec) {
  const auto decoded = DecodeGroupedWgrad(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  const ffi::Error error = CheckBlas("grouped_wgrad", {decoded->tokens, decoded->m, decoded->n});
  if (error.failure()) return error;
  const ffi::Error values = CheckValues(*decoded);
  return values.failure() ? values : Run<cpu::GroupedWgrad>(*decoded);
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
TE_JAX_DEFINE_HANDLER(te_jax_cpu_grouped_gemm, GroupedGemmSpec, te_jax::HandleGroupedGemm);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_grouped_wgrad, GroupedWgradSpec, te_jax::HandleGroupedWgrad);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_scale_read, ScaleReadSpec,
                      te_jax::Handle<te_jax::ScaleReadSpec, te_jax::DecodeScaleRead, te_jax::cpu::ScaleRead>);
TE_JAX_DEFINE_HANDLER(te_jax_cpu_scale_write, ScaleWriteSpec,
                      te_jax::Handle<te_jax::ScaleWriteSpec, te_jax::DecodeScaleWrite, te_jax::cpu::ScaleWrite>);
