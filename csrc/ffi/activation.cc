#include "csrc/ffi/activation.h"

#include <string>

#include "csrc/ffi/quantize.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

ActivationKind DecodeKind(Operands& operands, std::string_view text) {
  if (text == "gelu") return ActivationKind::kGELU;
  if (text == "silu") return ActivationKind::kSiLU;
  if (text == "relu") return ActivationKind::kReLU;
  if (text == "geglu") return ActivationKind::kGEGLU;
  if (text == "swiglu") return ActivationKind::kSwiGLU;
  operands.Expect(false, "kind", "gelu, silu, relu, geglu or swiglu", text);
  return ActivationKind::kReLU;
}

}  // namespace

ffi::ErrorOr<ActivationArgs> DecodeActivation(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                              const ActivationSpec& spec) {
  Operands operands("activation", args, rets);
  ActivationArgs out;
  out.kind = DecodeKind(operands, spec.kind);
  const Array x = operands.Arg("x", kHighPrecision);
  Shape shape = x.shape;  // of the result
  if (operands.ok() && IsGated(out.kind) && !shape.empty()) {
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
  out.kind = DecodeKind(operands, spec.kind);
  const Array dy = operands.Arg("dy", kHighPrecision);
  DecodeRows(operands, spec, dy.shape, &out.rows, &out.cols);
  Shape shape = dy.shape;  // of x and the result
  if (operands.ok() && IsGated(out.kind)) shape.back() *= 2;
  out.x_dtype = dy.dtype;
  out.dy = dy.data;
  out.x = operands.ArgOf("x", dy.dtype, shape);
  out.out = DecodeQuantized(operands, spec, dy.dtype, shape);
  if (operands.ok() && IsGated(out.kind) && out.out.scaling != Scaling::kTensor) {
    operands.Expect(out.cols % kBlock == 0, "dy's last dimension of a gated activation in blocks", "a multiple of 128",
                    std::to_string(out.cols));
  }
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
