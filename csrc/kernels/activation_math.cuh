// Activations and their derivatives in fp32, from exact exponentials and IEEE divisions.
#ifndef TE_JAX_KERNELS_ACTIVATION_MATH_CUH_
#define TE_JAX_KERNELS_ACTIVATION_MATH_CUH_

#include <type_traits>

#include "csrc/core/args.h"

namespace te_jax::kernels {

__device__ inline float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

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

template <ActivationKind kind>
__device__ inline ValueAndSlope Activate(float x) {
  if constexpr (kind == ActivationKind::kReLU) {
    // A NaN stays one.
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (kind == ActivationKind::kSiLU) {
    const float s = Sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
  } else {
    // GELU, tanh approximation: x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); the sigmoid form
    // does not cancel where tanh u is near -1.
    static_assert(kind == ActivationKind::kGELU);
    constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
    constexpr float kCubic = 0.044715f;
    const float s = Sigmoid(kTwoSqrt2OverPi * x * (1.0f + kCubic * x * x));
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
