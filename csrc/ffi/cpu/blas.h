#ifndef TE_JAX_FFI_CPU_BLAS_H_
#define TE_JAX_FFI_CPU_BLAS_H_

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "csrc/cpu/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace te_jax {

// Whether there is a BLAS, and whether its 32-bit sizes are enough.
inline xla::ffi::Error CheckBlas(std::string_view op, std::initializer_list<int64_t> sizes) {
  if (!cpu::HasSgemm()) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition,
                           "te_jax " + std::string(op) + ": no BLAS was given (set_sgemm)");
  }
  for (const int64_t size : sizes) {
    if (size <= std::numeric_limits<int>::max()) continue;
    return xla::ffi::Error(xla::ffi::ErrorCode::kUnimplemented,
                           "te_jax " + std::string(op) + ": expected sizes below 2^31 on CPU");
  }
  return xla::ffi::Error::Success();
}

}  // namespace te_jax

#endif  // TE_JAX_FFI_CPU_BLAS_H_
