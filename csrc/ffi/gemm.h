// Operands of te_jax_gemm, checked and decoded.
#ifndef TE_JAX_FFI_GEMM_H_
#define TE_JAX_FFI_GEMM_H_

#include "csrc/core/args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<GemmArgs> DecodeGemm(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
                                       const GemmSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_GEMM_H_
