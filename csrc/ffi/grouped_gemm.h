// Operands of te_jax_grouped_gemm and te_jax_grouped_wgrad, checked and decoded. The values of group_sizes are not looked
// at: they may be on a device.
#ifndef TE_JAX_FFI_GROUPED_GEMM_H_
#define TE_JAX_FFI_GROUPED_GEMM_H_

#include "csrc/core/grouped_args.h"
#include "csrc/ffi/attrs.h"

namespace te_jax {

xla::ffi::ErrorOr<GroupedGemmArgs> DecodeGroupedGemm(const xla::ffi::RemainingArgs& args,
                                                     const xla::ffi::RemainingRets& rets, const GroupedGemmSpec& spec);
xla::ffi::ErrorOr<GroupedWgradArgs> DecodeGroupedWgrad(const xla::ffi::RemainingArgs& args,
                                                       const xla::ffi::RemainingRets& rets,
                                                       const GroupedWgradSpec& spec);

}  // namespace te_jax

#endif  // TE_JAX_FFI_GROUPED_GEMM_H_
