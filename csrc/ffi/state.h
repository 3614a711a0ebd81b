// Operands of te_jax_scale_read and te_jax_scale_write, checked and decoded.
#ifndef TE_JAX_FFI_STATE_H_
#define TE_JAX_FFI_STATE_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<ScaleReadArgs> DecodeScaleRead(const xla::ffi::RemainingArgs& args,
                                                 const xla::ffi::RemainingRets& rets, const ScaleReadSpec& spec);

xla::ffi::ErrorOr<ScaleWriteArgs> DecodeScaleWrite(const xla::ffi::RemainingArgs& args,
                                                   const xla::ffi::RemainingRets& rets, const ScaleWriteSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_STATE_H_
