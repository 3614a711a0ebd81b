#include "csrc/ffi/norm.h"

#include "csrc/ffi/quantize.h"

namespace te_jax {

namespace ffi = xla::ffi;

ffi::ErrorOr<NormArgs> DecodeNorm(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                  const NormSpec& spec) {
  Operands operands("norm", args, rets);
  NormArgs out;
  const bool layernorm = spec.kind == "layernorm";
  operands.Expect(layernorm || spec.kind == "rmsnorm", "kind", "\"rmsnorm\" or \"layernorm\"", spec.kind);
  out.kind = layernorm ? NormKind::kLayerNorm : NormKind::kRMSNorm;
  out.epsilon = spec.epsilon;
  out.zero_centered_gamma = spec.zero_centered_gamma;

  const Array x = operands.Arg("x", kHighPrecision);
  DecodeRows(operands, spec, x.shape, &out.rows, &out.cols);
  out.x = x.data;
  out.x_dtype = x.dtype;
  const Array gamma = operands.WithShape(operands.Arg("gamma", kHighPrecision), {out.cols});
  out.gamma = gamma.data;
  out.param_dtype = gamma.dtype;
  if (layernorm) out.beta = operands.ArgOf("beta", gamma.dtype, {out.cols});

  if (spec.if_unseeded) operands.Check(!spec.stats, "if_unseeded: expected a pass that wants amax alone");
  out.out = DecodeQuantized(operands, spec, x.dtype, x.shape);
  if (spec.stats && operands.ok()) {
    const Shape lead(x.shape.begin(), x.shape.end() - 1);
    if (layernorm) out.mean = operands.RetOf<float>("mean", DType::kF32, lead);
    out.rstd = operands.RetOf<float>("rstd", DType::kF32, lead);
  }
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
