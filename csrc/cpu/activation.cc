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
  Point At(float x) const {
    constexpr float kSqrt2OverPi = 0.7978845608f, kCubic = 0.044715f;
    const float s = Sigmoid(2.0f * kSqrt2OverPi * (x + kCubic * x * x * x));
    const float du = kSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    return {x * s, s + 2.0f * x * s * (1.0f - s) * du};
  }
};

// x sigmoid(alpha x): SiLU; QuickGELU with alpha 1.702.
struct SiLU {
  float alpha;
  Point At(float x) const {
    const float z = alpha * x, s = Sigmoid(z);
    return {x * s, s + z * s * (1.0f - s)};
  }
};

// A NaN stays one.
struct ReLU {
  Point At(float x) const { return {x <= 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f}; }
};

struct SquaredReLU {
  Point At(float x) const {
    const float r = x <= 0.0f ? 0.0f : x;
    return {r * r, 2.0f * r};
  }
};

struct LogisticSigmoid {
  Point At(float x) const {
    const float s = Sigmoid(x);
    return {s, s * (1.0f - s)};
  }
};

// x clamped to at most `limit`, and to +-limit. A NaN stays one.
inline float ClampAbove(float x, float limit) { return x > limit ? limit : x; }
inline float Clamp(float x, float limit) { return x < -limit ? -limit : ClampAbove(x, limit); }

// The halves of a row x [2 * cols].
struct Halves {
  float *gate, *linear;
  Halves(const ActivationDesc& activation, float* x, int64_t cols)
      : gate(activation.gate_second ? x + cols : x), linear(activation.gate_second ? x : x + cols) {}
};

template <typename Act>
[[nodiscard]] bool Forward(const ActivationArgs& args, Act act) {
  const ActivationDesc& activation = args.activation;
  const int64_t cols = args.cols, width = activation.gated ? 2 * cols : cols;  // width: of x
  const Scratch<float> scratch(width);
  if (!scratch) return false;
  float* x = scratch.get();
  return ProduceAndWrite(args.rows, cols, args.x_dtype, args.out, [&](int64_t row, float* y) {
    LoadRow(args.x, args.x_dtype, row * width, width, x);
    if (!activation.gated) {
      for (int64_t c = 0; c < cols; ++c) y[c] = act.At(x[c]).value;
      return;
    }
    const auto [gate, linear] = Halves(activation, x, cols);
    if (activation.clamped) {
      const float limit = activation.limit, offset = activation.linear_offset;
      for (int64_t c = 0; c < cols; ++c) gate[c] = ClampAbove(gate[c], limit);
      for (int64_t c = 0; c < cols; ++c) linear[c] = Clamp(linear[c], limit) + offset;
    }
    for (int64_t c = 0; c < cols; ++c) y[c] = act.At(gate[c]).value;
    for (int64_t c = 0; c < cols; ++c) y[c] *= linear[c];
  });
}

// y = act(g) u: dg = dy u act'(g), du = dy act(g).
template <typename Act>
void GateGradient(const float* dy, const float* gate, const float* linear, int64_t cols, Act act, float* d_gate,
                  float* d_linear) {
  for (int64_t c = 0; c < cols; ++c) {
    const Point at = act.At(gate[c]);
    d_gate[c] = dy[c] * linear[c] * at.derivative;
    d_linear[c] = dy[c] * at.value;
  }
}

// The same clamped: a clamp passes nothing back from beyond its limit.
template <typename Act>
void ClampedGateGradient(const float* dy, const float* gate, const float* linear, int64_t cols, Act act, float limit,
                         float offset, float* d_gate, float* d_linear) {
  for (int64_t c = 0; c < cols; ++c) {
    const Point at = act.At(ClampAbove(gate[c], limit));
    const float slope = gate[c] > limit ? 0.0f : at.derivative;
    const float value = linear[c] > limit || linear[c] < -limit ? 0.0f : at.value;
    d_gate[c] = dy[c] * (Clamp(linear[c], limit) + offset) * slope;
    d_linear[c] = dy[c] * value;
  }
}

template <typename Act>
[[nodiscard]] bool Backward(const ActivationGradArgs& args, Act act) {
  const ActivationDesc& activation = args.activation;
  const int64_t cols = args.cols, width = activation.gated ? 2 * cols : cols;  // width: of x and dx
  const Scratch<float> x_scratch(width), dy_scratch(cols);
  if (!x_scratch || !dy_scratch) return false;
  float *x = x_scratch.get(), *dy = dy_scratch.get();
  return ProduceAndWrite(args.rows, width, args.x_dtype, args.out, [&](int64_t row, float* dx) {
    LoadRow(args.x, args.x_dtype, row * width, width, x);
    LoadRow(args.dy, args.x_dtype, row * cols, cols, dy);
    if (!activation.gated) {
      for (int64_t c = 0; c < cols; ++c) dx[c] = dy[c] * act.At(x[c]).derivative;
      return;
    }
    const auto [gate, linear] = Halves(activation, x, cols);
    const auto [d_gate, d_linear] = Halves(activation, dx, cols);
    if (activation.clamped) {
      ClampedGateGradient(dy, gate, linear, cols, act, activation.limit, activation.linear_offset, d_gate, d_linear);
    } else {
      GateGradient(dy, gate, linear, cols, act, d_gate, d_linear);
    }
  });
}

// Calls run(the function of `activation`).
template <typename Run>
[[nodiscard]] bool WithFunction(const ActivationDesc& activation, Run run) {
  switch (activation.function) {
    case ActivationFunction::kGELU: return run(GELU{});
    case ActivationFunction::kSiLU: return run(SiLU{activation.alpha});
    case ActivationFunction::kReLU: return run(ReLU{});
    case ActivationFunction::kSquaredReLU: return run(SquaredReLU{});
    case ActivationFunction::kSigmoid: return run(LogisticSigmoid{});
  }
  return false;
}

}  // namespace

bool Activation(const ActivationArgs& args) {
  if (SkipSeeded(args.out)) return true;
  return WithFunction(args.activation, [&](auto act) { return Forward(args, act); });
}

bool ActivationGrad(const ActivationGradArgs& args) {
  if (SkipSeeded(args.out)) return true;
  return WithFunction(args.activation, [&](auto act) { return Backward(args, act); });
}

}  // namespace te_jax::cpu
