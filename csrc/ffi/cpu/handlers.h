#ifndef TE_JAX_FFI_CPU_HANDLERS_H_
#define TE_JAX_FFI_CPU_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_quantize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_dequantize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_norm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_norm_grad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_activation);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_activation_grad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cpu_gemm);

#endif  // TE_JAX_FFI_CPU_HANDLERS_H_
