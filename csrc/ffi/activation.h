// Operands of te_jax_activation and te_jax_activation_grad, checked and decoded.
#ifndef TE_JAX_FFI_ACTIVATION_H_
#define TE_JAX_FFI_ACTIVATION_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<ActivationArgs> DecodeActivation(const xla::ffi::RemainingArgs& args,
                                                   const xla::ffi::RemainingRets& rets, const ActivationSpec& spec);

xla::ffi::ErrorOr<ActivationGradArgs> DecodeActivationGrad(const xla::ffi::RemainingArgs& args,
                                                           const xla::ffi::RemainingRets& rets,
                                                           const ActivationGradSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_ACTIVATION_H_
