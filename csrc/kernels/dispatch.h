// From a runtime dtype to a type parameter.
#ifndef TE_JAX_KERNELS_DISPATCH_H_
#define TE_JAX_KERNELS_DISPATCH_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "csrc/core/args.h"

namespace te_jax::kernels {

template <class T>
struct TypeTag {
  using type = T;
};

// Calls launch(TypeTag<T>{}) for the high-precision type of `dtype`.
template <class Launch>
cudaError_t DispatchFloat(DType dtype, Launch&& launch) {
  switch (dtype) {
    case DType::kF32: return launch(TypeTag<float>{});
    case DType::kBF16: return launch(TypeTag<__nv_bfloat16>{});
    case DType::kF16: return launch(TypeTag<__half>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_DISPATCH_H_
