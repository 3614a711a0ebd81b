// Operands of te_jax_collective_gemm, checked and decoded.
#ifndef TE_JAX_FFI_COLLECTIVE_GEMM_H_
#define TE_JAX_FFI_COLLECTIVE_GEMM_H_

#include "csrc/comm/operands.h"
#include "csrc/ffi/attrs.h"
#include "xla/ffi/api/ffi.h"

namespace te_jax {

struct CollectiveGemmCall {
  comm::CollectiveGemm call;
  const int32_t* place = nullptr;  // [2]: rank, group; in device memory on CUDA
};

xla::ffi::ErrorOr<CollectiveGemmCall> DecodeCollectiveGemm(const xla::ffi::RemainingArgs& args,
                                                           const xla::ffi::RemainingRets& rets,
                                                           const CollectiveGemmSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_COLLECTIVE_GEMM_H_
