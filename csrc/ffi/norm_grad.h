// Operands of te_jax_norm_grad, checked and decoded.
#ifndef TE_JAX_FFI_NORM_GRAD_H_
#define TE_JAX_FFI_NORM_GRAD_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<NormGradArgs> DecodeNormGrad(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
                                               const NormGradSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_NORM_GRAD_H_
