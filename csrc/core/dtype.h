// Names of element types, as numpy and jax spell them, and of kinds of scaling.
#ifndef TE_JAX_CORE_DTYPE_H_
#define TE_JAX_CORE_DTYPE_H_

#include "csrc/core/args.h"

namespace te_jax {

constexpr const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
    case DType::kE4M3: return "float8_e4m3fn";
    case DType::kE5M2: return "float8_e5m2";
  }
  return "?";
}

constexpr const char* NameOf(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor: return "tensor";
    case Scaling::kBlock1x128: return "block_1x128";
    case Scaling::kBlock128x128: return "block_128x128";
  }
  return "?";
}

// Bytes of an element.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kE4M3:
    case DType::kE5M2: return 1;
  }
  return 0;
}

}  // namespace te_jax

#endif  // TE_JAX_CORE_DTYPE_H_
