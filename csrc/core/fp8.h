// FP8 formats as facts: constants, the value of every code, and the cast to them. Host code; the CUDA kernels use the
// hardware's conversions, which give the same bits.
#ifndef TE_JAX_CORE_FP8_H_
#define TE_JAX_CORE_FP8_H_

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "csrc/core/args.h"

namespace te_jax {

// OCP 8-bit floats (https://arxiv.org/abs/2209.05433). E4M3 is the "FN" variant: no infinities.
struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
};

struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
};

// The code written for NaN in either format, without a sign: what CUDA's conversions write.
constexpr uint8_t kNaNCode = 0x7f;

constexpr bool IsFP8(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2; }
constexpr float FP8Max(DType format) { return format == DType::kE5M2 ? E5M2::kMax : E4M3::kMax; }

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Magnitude of an IEEE-like small float, rounded to nearest even, for `magnitude` = the bits of |x|. Branch-free, so
// that loops over it vectorise. Values beyond the format's range give codes beyond its last one.
template <int kMantissaBits, int kBias>
inline uint32_t EncodeMagnitude(uint32_t magnitude) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;
  // Normal: add just under half a unit in the last place, plus one if the kept part is odd, and cut.
  const uint32_t odd = (magnitude >> kShift) & 1;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << kMantissaBits;
  const uint32_t normal = ((magnitude + ((1u << (kShift - 1)) - 1) + odd) >> kShift) - kRebias;
  // Subnormal: adding a float whose unit in the last place is the smallest subnormal makes the hardware round.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - kBias + 23 - kMantissaBits) << 23;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(kMagic)) - kMagic;
  return magnitude < kMinNormal ? subnormal : normal;
}

// cast(clamp(y * scale)): round to nearest even, saturating; NaN if y is not finite or the product is NaN.
template <typename Format>
inline uint8_t Encode(float y, float scale) {
  constexpr uint32_t kInf = 0x7f800000u;
  const uint32_t bits = BitsOf(y * scale);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t max = BitsOf(Format::kMax);
  const uint32_t clamped = magnitude < max ? magnitude : max;
  const uint32_t code = EncodeMagnitude<Format::kMantissaBits, Format::kBias>(clamped) | ((bits >> 24) & 0x80u);
  const bool nan = (BitsOf(y) & 0x7fffffffu) >= kInf || magnitude > kInf;
  return static_cast<uint8_t>(nan ? kNaNCode : code);
}

// The value of a code, in float32 (exact).
inline float Decode(uint8_t code, DType format) {
  const int mantissa_bits = format == DType::kE5M2 ? E5M2::kMantissaBits : E4M3::kMantissaBits;
  const int bias = format == DType::kE5M2 ? E5M2::kBias : E4M3::kBias;
  const int magnitude = code & 0x7f;
  const int exponent = magnitude >> mantissa_bits;
  const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
  float value;
  if (format == DType::kE4M3 && magnitude == 0x7f) {
    value = NAN;
  } else if (format == DType::kE5M2 && exponent == 31) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  }
  return code & 0x80 ? -value : value;
}

using DecodeTable = std::array<float, 256>;

inline const DecodeTable& TableOf(DType format) {
  static const auto make = [](DType f) {
    DecodeTable table{};
    for (int code = 0; code < 256; ++code) table[code] = Decode(static_cast<uint8_t>(code), f);
    return table;
  };
  static const DecodeTable e4m3 = make(DType::kE4M3);
  static const DecodeTable e5m2 = make(DType::kE5M2);
  return format == DType::kE5M2 ? e5m2 : e4m3;
}

}  // namespace te_jax

#endif  // TE_JAX_CORE_FP8_H_
