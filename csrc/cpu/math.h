// fp32 functions that vectorise (the C library's calls don't) and give the same bits on every host.
#ifndef TE_JAX_CPU_MATH_H_
#define TE_JAX_CPU_MATH_H_

#include <cstdint>

#include "csrc/core/fp8.h"

namespace te_jax::cpu {

// exp(x) within 2 units in the last place, for x clamped to [-87, 88]: 2^n * e^r with |r| <= ln(2) / 2, e^r by the
// polynomial of Cephes' expf.
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, found in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const uint32_t exponent = BitsOf(shifted) - BitsOf(kRound) + 127u;
  return p * FloatOf(exponent << 23);
}

inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// sum of f(i) over [0, n), in 16 interleaved partial sums: vectorises, and the order is fixed.
template <typename F>
inline float Sum(int64_t n, F f) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += f(i + j);
  }
  float total = 0.0f;
  for (int j = 0; j < kLanes; ++j) total += lanes[j];
  for (; i < n; ++i) total += f(i);
  return total;
}

}  // namespace te_jax::cpu

#endif  // TE_JAX_CPU_MATH_H_
