// Activations and their derivatives in fp32.
#ifndef TE_JAX_KERNELS_ACTIVATION_MATH_CUH_
#define TE_JAX_KERNELS_ACTIVATION_MATH_CUH_

#include <type_traits>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// 1 / (1 + exp(-x)). For results that are rounded to 16 bits the hardware's approximations (each within some 2^-21) do:
// the accurate functions take longer than the memory traffic.
template <class T>
__device__ inline float Sigmoid(float x) {
  if constexpr (sizeof(T) == 2) {
    float exponential, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * -1.4426950408889634f));  // -log2(e)
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exponential));
    return inverse;
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

struct ValueAndSlope {
  float value, slope;  // act(x), act'(x)
};

// The ungated part: GELU for GEGLU, SiLU for SwiGLU. Variables, because device code can't call host functions.
template <ActivationKind kind>
inline constexpr bool kGated = IsGated(kind);
template <ActivationKind kind>
inline constexpr ActivationKind kBase = kind == ActivationKind::kGEGLU    ? ActivationKind::kGELU
                                        : kind == ActivationKind::kSwiGLU ? ActivationKind::kSiLU
                                                                          : kind;

// T: the dtype that the result will be rounded to.
template <class T, ActivationKind kind>
__device__ inline ValueAndSlope Activate(float x) {
  if constexpr (kind == ActivationKind::kReLU) {
    // A NaN stays one.
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (kind == ActivationKind::kSiLU) {
    const float s = Sigmoid<T>(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
  } else {
    // GELU, tanh approximation: x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); the sigmoid form
    // does not cancel where tanh u is near -1.
    static_assert(kind == ActivationKind::kGELU);
    constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
    constexpr float kCubic = 0.044715f;
    const float s = Sigmoid<T>(kTwoSqrt2OverPi * x * (1.0f + kCubic * x * x));
    const float slope_2u = kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    return {x * s, s * (1.0f + x * (1.0f - s) * slope_2u)};
  }
}

// Calls launch(std::integral_constant<ActivationKind, kind>).
template <class Launch>
auto DispatchActivation(ActivationKind kind, Launch&& launch) {
  switch (kind) {
    case ActivationKind::kGELU: return launch(std::integral_constant<ActivationKind, ActivationKind::kGELU>{});
    case ActivationKind::kSiLU: return launch(std::integral_constant<ActivationKind, ActivationKind::kSiLU>{});
    case ActivationKind::kReLU: return launch(std::integral_constant<ActivationKind, ActivationKind::kReLU>{});
    case ActivationKind::kGEGLU: return launch(std::integral_constant<ActivationKind, ActivationKind::kGEGLU>{});
    case ActivationKind::kSwiGLU: break;
  }
  return launch(std::integral_constant<ActivationKind, ActivationKind::kSwiGLU>{});
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_ACTIVATION_MATH_CUH_
