// Operands of te_jax_quantize, checked and decoded. `DecodeQuantized` is the part that every quantizing pass ends in.
#ifndef TE_JAX_FFI_QUANTIZE_H_
#define TE_JAX_FFI_QUANTIZE_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/check.h"

namespace te_jax {

// The scale operand and the wanted results of a pass that quantizes y, of shape `shape` = [*lead, C] and dtype
// `dtype`. Call it after the pass's other operands, before its other results.
QuantizedOut DecodeQuantized(Operands& operands, const QuantizingSpec& spec, DType dtype, const Shape& shape);

// Checks that y [*lead, C] has rows and an aligned C (and aligned rows where it is written transposed).
// Sets rows and cols.
void DecodeRows(Operands& operands, const QuantizingSpec& spec, const Shape& shape, int64_t* rows, int64_t* cols);

xla::ffi::ErrorOr<QuantizeArgs> DecodeQuantize(const xla::ffi::RemainingArgs& args,
                                               const xla::ffi::RemainingRets& rets, const QuantizeSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_QUANTIZE_H_
