// Operands of te_jax_norm, checked and decoded.
#ifndef TE_JAX_FFI_NORM_H_
#define TE_JAX_FFI_NORM_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<NormArgs> DecodeNorm(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
                                       const NormSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_NORM_H_
