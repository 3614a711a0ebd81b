// Activations and their derivatives in fp32.
#ifndef TE_JAX_KERNELS_ACTIVATION_MATH_CUH_
#define TE_JAX_KERNELS_ACTIVATION_MATH_CUH_

#include <cuda_runtime_api.h>

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

// T: the dtype that the result will be rounded to.
template <class T>
__device__ inline ValueAndSlope GELUAt(float x) {
  // tanh approximation: x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); the sigmoid form does not
  // cancel where tanh u is near -1.
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  constexpr float kCubic = 0.044715f;
  const float s = Sigmoid<T>(kTwoSqrt2OverPi * x * (1.0f + kCubic * x * x));
  const float slope_2u = kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
  return {x * s, s * (1.0f + x * (1.0f - s) * slope_2u)};
}

template <class T>
__device__ inline ValueAndSlope SiLUAt(float x, float alpha = 1.0f) {
  const float z = alpha * x, s = Sigmoid<T>(z);
  return {x * s, s * (1.0f + z * (1.0f - s))};
}

// A NaN stays one.
__device__ inline ValueAndSlope ReLUAt(float x) { return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f}; }

__device__ inline ValueAndSlope SquaredReLUAt(float x) {
  const float r = x < 0.0f ? 0.0f : x;
  return {r * r, 2.0f * r};
}

template <class T>
__device__ inline ValueAndSlope SigmoidAt(float x) {
  const float s = Sigmoid<T>(x);
  return {s, s * (1.0f - s)};
}

// What a loader applies to a chunk of x, or of its gate: value[i] = act(x[i]), slope[i] = act'(x[i]). The functions
// that models use most are types of their own; the others share a kernel, which chooses once for each chunk: a kernel
// for each would double the time that these files take to compile.
struct GELU {
  static constexpr bool kIsAny = false;
  template <class T, int N>
  __device__ void Apply(const float (&x)[N], ValueAndSlope (&y)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = GELUAt<T>(x[i]);
  }
};

struct SiLU {
  static constexpr bool kIsAny = false;
  template <class T, int N>
  __device__ void Apply(const float (&x)[N], ValueAndSlope (&y)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = SiLUAt<T>(x[i]);
  }
};

struct AnyActivation {
  static constexpr bool kIsAny = true;
  ActivationDesc desc;

  template <class T, int N>
  __device__ void Apply(const float (&x)[N], ValueAndSlope (&y)[N]) const {
    switch (desc.function) {
      case ActivationFunction::kGELU: return Each<N>(x, y, [](float v) { return GELUAt<T>(v); });
      case ActivationFunction::kSiLU:
        return Each<N>(x, y, [alpha = desc.alpha](float v) { return SiLUAt<T>(v, alpha); });
      case ActivationFunction::kReLU: return Each<N>(x, y, [](float v) { return ReLUAt(v); });
      case ActivationFunction::kSquaredReLU: return Each<N>(x, y, [](float v) { return SquaredReLUAt(v); });
      case ActivationFunction::kSigmoid: return Each<N>(x, y, [](float v) { return SigmoidAt<T>(v); });
    }
  }

 private:
  template <int N, class F>
  __device__ static void Each(const float (&x)[N], ValueAndSlope (&y)[N], F act) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = act(x[i]);
  }
};

// x clamped to at most `limit`, and to +-limit. A NaN stays one.
__device__ inline float ClampAbove(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float Clamp(float x, float limit) { return x < -limit ? -limit : ClampAbove(x, limit); }

template <int N>
__device__ inline void Swap(float (&a)[N], float (&b)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float kept = a[i];
    a[i] = b[i];
    b[i] = kept;
  }
}

// Calls launch(function, whether it is gated as an integral constant).
template <class Launch>
cudaError_t DispatchActivation(const ActivationDesc& desc, Launch&& launch) {
  const bool plain = !desc.clamped && !desc.gate_second && desc.alpha == 1.0f;
  const auto with_function = [&](auto gated) {
    if (plain && desc.function == ActivationFunction::kGELU) return launch(GELU{}, gated);
    if (plain && desc.function == ActivationFunction::kSiLU) return launch(SiLU{}, gated);
    return launch(AnyActivation{desc}, gated);
  };
  return desc.gated ? with_function(std::true_type{}) : with_function(std::false_type{});
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_ACTIVATION_MATH_CUH_
