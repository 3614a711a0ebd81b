#include "csrc/cpu/kernels.h"
#include "csrc/cpu/math.h"
#include "csrc/cpu/quantized.h"

namespace te_jax::cpu {
namespace {

// An activation: its value at x, and its derivative.
struct Point {
  float value, derivative;
};

// GELU, tanh approximation: 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GELU {
  static Point At(float x) {
    constexpr float kSqrt2OverPi = 0.7978845608f, kCubic = 0.044715f;
    const float s = Sigmoid(2.0f * kSqrt2OverPi * (x + kCubic * x * x * x));
    const float du = kSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    return {x * s, s + 2.0f * x * s * (1.0f - s) * du};
  }
};

// SiLU: x sigmoid(x).
struct SiLU {
  static Point At(float x) {
    const float s = Sigmoid(x);
    return {x * s, s + x * s * (1.0f - s)};
  }
};

struct ReLU {
  static Point At(float x) { return {x <= 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f}; }
};

template <typename Act>
[[nodiscard]] bool Forward(const ActivationArgs& args) {
  const int64_t cols = args.cols;
  const bool gated = IsGated(args.kind);
  const int64_t width = gated ? 2 * cols : cols;  // of x
  const Scratch<float> scratch(width);
  if (!scratch) return false;
  float* x = scratch.get();
  return ProduceAndWrite(args.rows, cols, args.x_dtype, args.out, [&](int64_t row, float* y) {
    LoadRow(args.x, args.x_dtype, row * width, width, x);
    for (int64_t c = 0; c < cols; ++c) y[c] = Act::At(x[c]).value;
    if (gated) {
      for (int64_t c = 0; c < cols; ++c) y[c] *= x[cols + c];
    }
  });
}

// y = act(x):         dx = dy act'(x)
// y = act(x1) x2:     dx1 = dy x2 act'(x1),  dx2 = dy act(x1)
template <typename Act>
[[nodiscard]] bool Backward(const ActivationGradArgs& args) {
  const int64_t cols = args.cols;
  const bool gated = IsGated(args.kind);
  const int64_t width = gated ? 2 * cols : cols;  // of x and dx
  const Scratch<float> x_scratch(width), dy_scratch(cols);
  if (!x_scratch || !dy_scratch) return false;
  float *x = x_scratch.get(), *dy = dy_scratch.get();
  return ProduceAndWrite(args.rows, width, args.x_dtype, args.out, [&](int64_t row, float* dx) {
    LoadRow(args.x, args.x_dtype, row * width, width, x);
    LoadRow(args.dy, args.x_dtype, row * cols, cols, dy);
    if (gated) {
      for (int64_t c = 0; c < cols; ++c) {
        const Point act = Act::At(x[c]);
        dx[c] = dy[c] * x[cols + c] * act.derivative;
        dx[cols + c] = dy[c] * act.value;
      }
    } else {
      for (int64_t c = 0; c < cols; ++c) dx[c] = dy[c] * Act::At(x[c]).derivative;
    }
  });
}

}  // namespace

bool Activation(const ActivationArgs& args) {
  if (SkipSeeded(args.out)) return true;
  switch (args.kind) {
    case ActivationKind::kGELU:
    case ActivationKind::kGEGLU: return Forward<GELU>(args);
    case ActivationKind::kSiLU:
    case ActivationKind::kSwiGLU: return Forward<SiLU>(args);
    case ActivationKind::kReLU: return Forward<ReLU>(args);
  }
  return false;
}

bool ActivationGrad(const ActivationGradArgs& args) {
  if (SkipSeeded(args.out)) return true;
  switch (args.kind) {
    case ActivationKind::kGELU:
    case ActivationKind::kGEGLU: return Backward<GELU>(args);
    case ActivationKind::kSiLU:
    case ActivationKind::kSwiGLU: return Backward<SiLU>(args);
    case ActivationKind::kReLU: return Backward<ReLU>(args);
  }
  return false;
}

}  // namespace te_jax::cpu
