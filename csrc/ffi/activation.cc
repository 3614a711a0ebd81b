#include "csrc/ffi/activation.h"

#include <string>

#include "csrc/ffi/quantize.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

constexpr float kQuickGELUAlpha = 1.702f;

struct Kind {
  std::string_view name;
  ActivationDesc activation;
};

// Called as in te_jax/primitives/spec.py.
constexpr Kind kKinds[] = {
    {"gelu", {ActivationFunction::kGELU}},
    {"silu", {ActivationFunction::kSiLU}},
    {"relu", {ActivationFunction::kReLU}},
    {"quick_gelu", {ActivationFunction::kSiLU, false, false, false, kQuickGELUAlpha}},
    {"squared_relu", {ActivationFunction::kSquaredReLU}},
    {"geglu", {ActivationFunction::kGELU, true}},
    {"swiglu", {ActivationFunction::kSiLU, true}},
    {"glu", {ActivationFunction::kSigmoid, true}},
    {"reglu", {ActivationFunction::kReLU, true}},
    {"qgeglu", {ActivationFunction::kSiLU, true, false, false, kQuickGELUAlpha}},
    {"sreglu", {ActivationFunction::kSquaredReLU, true}},
    {"clamped_swiglu", {ActivationFunction::kSiLU, true, false, true}},
};

ActivationDesc DecodeDesc(Operands& operands, const ActivationSpec& spec) {
  std::string names;
  for (const Kind& kind : kKinds) {
    if (kind.name != spec.kind) {
      names += (names.empty() ? "" : ", ") + std::string(kind.name);
      continue;
    }
    ActivationDesc out = kind.activation;
    operands.Expect(out.gated || !spec.gate_second, "gate_second", "false for an activation without a gate", "true");
    out.gate_second = spec.gate_second;
    if (!out.clamped) return out;
    operands.Expect(spec.limit > 0.0f, "limit", "a positive number", std::to_string(spec.limit));
    out.limit = spec.limit;
    out.alpha = spec.alpha;
    out.linear_offset = spec.linear_offset;
    return out;
  }
  operands.Expect(false, "kind", names, spec.kind);
  return {};
}

}  // namespace

ffi::ErrorOr<ActivationArgs> DecodeActivation(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                              const ActivationSpec& spec) {
  Operands operands("activation", args, rets);
  ActivationArgs out;
  out.activation = DecodeDesc(operands, spec);
  const Array x = operands.Arg("x", kHighPrecision);
  Shape shape = x.shape;  // of the result
  if (operands.ok() && out.activation.gated && !shape.empty()) {
    operands.Expect(shape.back() % 2 == 0, "x's last dimension of a gated activation", "an even number",
                    std::to_string(shape.back()));
    shape.back() /= 2;
  }
  DecodeRows(operands, spec, shape, &out.rows, &out.cols);
  out.x = x.data;
  out.x_dtype = x.dtype;
  out.out = DecodeQuantized(operands, spec, x.dtype, shape);
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

ffi::ErrorOr<ActivationGradArgs> DecodeActivationGrad(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                                      const ActivationGradSpec& spec) {
  Operands operands("activation_grad", args, rets);
  ActivationGradArgs out;
  out.activation = DecodeDesc(operands, spec);
  const Array dy = operands.Arg("dy", kHighPrecision);
  DecodeRows(operands, spec, dy.shape, &out.rows, &out.cols);
  Shape shape = dy.shape;  // of x and the result
  if (operands.ok() && out.activation.gated) shape.back() *= 2;
  out.x_dtype = dy.dtype;
  out.dy = dy.data;
  out.x = operands.ArgOf("x", dy.dtype, shape);
  out.out = DecodeQuantized(operands, spec, dy.dtype, shape);
  if (operands.ok() && out.activation.gated && out.out.scaling != Scaling::kTensor) {
    operands.Expect(out.cols % kBlock == 0, "dy's last dimension of a gated activation in blocks", "a multiple of 128",
                    std::to_string(out.cols));
  }
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
