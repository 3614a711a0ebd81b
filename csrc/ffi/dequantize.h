// Operands of te_jax_dequantize, checked and decoded.
#ifndef TE_JAX_FFI_DEQUANTIZE_H_
#define TE_JAX_FFI_DEQUANTIZE_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<DequantizeArgs> DecodeDequantize(const xla::ffi::RemainingArgs& args,
                                                   const xla::ffi::RemainingRets& rets, const DequantizeSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_DEQUANTIZE_H_
