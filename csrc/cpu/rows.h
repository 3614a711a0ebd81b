// Rows of any dtype to and from fp32, and scratch memory. The loops vectorise.
#ifndef TE_JAX_CPU_ROWS_H_
#define TE_JAX_CPU_ROWS_H_

#include <cstdint>
#include <memory>
#include <new>

#include "csrc/core/args.h"
#include "csrc/core/dtype.h"
#include "csrc/core/fp8.h"

namespace te_jax::cpu {

// Uninitialised memory; null where there is none left. Never throws.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(new (std::nothrow) T[static_cast<size_t>(count)]) {}
  T* get() const { return data_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  std::unique_ptr<T[]> data_;
};


inline float FromBF16(uint16_t x) { return FloatOf(static_cast<uint32_t>(x) << 16); }

inline uint16_t ToBF16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

inline float FromF16(uint16_t x) {
  const uint32_t magnitude = x & 0x7fffu;
  const uint32_t finite = BitsOf(FloatOf(magnitude << 13) * 0x1p112f);  // moves the exponent bias from 15 to 127
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return FloatOf((magnitude >= 0x7c00u ? special : finite) | (static_cast<uint32_t>(x & 0x8000u) << 16));
}

inline uint16_t ToF16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t code = EncodeMagnitude<10, 15>(magnitude);
  const uint32_t finite = magnitude >= 0x477ff000u ? 0x7c00u : code;  // 65520 and above round to infinity
  return static_cast<uint16_t>((magnitude > 0x7f800000u ? 0x7e00u : finite) | ((bits >> 16) & 0x8000u));
}

// out[0..n) = fp32 of x[offset..offset + n).
inline void LoadRow(const void* x, DType dtype, int64_t offset, int64_t n, float* out) {
  switch (dtype) {
    case DType::kF32: {
      const float* row = static_cast<const float*>(x) + offset;
      for (int64_t i = 0; i < n; ++i) out[i] = row[i];
      return;
    }
    case DType::kBF16: {
      const uint16_t* row = static_cast<const uint16_t*>(x) + offset;
      for (int64_t i = 0; i < n; ++i) out[i] = FromBF16(row[i]);
      return;
    }
    case DType::kF16: {
      const uint16_t* row = static_cast<const uint16_t*>(x) + offset;
      for (int64_t i = 0; i < n; ++i) out[i] = FromF16(row[i]);
      return;
    }
    case DType::kE4M3:
    case DType::kE5M2: {
      const uint8_t* row = static_cast<const uint8_t*>(x) + offset;
      const DecodeTable& table = TableOf(dtype);
      for (int64_t i = 0; i < n; ++i) out[i] = table[row[i]];
      return;
    }
  }
}

// x[offset..offset + n) = row[0..n), rounded to nearest even. Not for FP8 (csrc/cpu/quantized.cc).
inline void StoreRow(const float* row, int64_t n, DType dtype, void* x, int64_t offset) {
  if (dtype == DType::kF32) {
    float* out = static_cast<float*>(x) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = row[i];
  } else if (dtype == DType::kBF16) {
    uint16_t* out = static_cast<uint16_t*>(x) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = ToBF16(row[i]);
  } else {
    uint16_t* out = static_cast<uint16_t*>(x) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = ToF16(row[i]);
  }
}

}  // namespace te_jax::cpu

#endif  // TE_JAX_CPU_ROWS_H_
