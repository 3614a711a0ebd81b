#ifndef TE_JAX_FFI_CUDA_HANDLERS_H_
#define TE_JAX_FFI_CUDA_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace te_jax {

// Whether handlers tell XLA that they may be captured in command buffers. XLA asks when they are registered, once.
void SetCommandBuffers(bool enabled);

}  // namespace te_jax

XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_quantize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_dequantize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_norm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_norm_grad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_activation);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_activation_grad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_gemm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_grouped_gemm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_grouped_wgrad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_collective_gemm);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_collective_gemm_instantiate);
XLA_FFI_DECLARE_TYPE_ID_SYMBOL(te_jax_cuda_call_site_id);
XLA_FFI_DECLARE_TYPE_INFO_SYMBOL(te_jax_cuda_call_site_info);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_scale_read);
XLA_FFI_DECLARE_HANDLER_SYMBOL(te_jax_cuda_scale_write);

#endif  // TE_JAX_FFI_CUDA_HANDLERS_H_
