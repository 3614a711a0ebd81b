#include "csrc/ffi/norm_grad.h"

#include <string>

#include "csrc/ffi/check.h"

namespace te_jax {

namespace ffi = xla::ffi;

ffi::ErrorOr<NormGradArgs> DecodeNormGrad(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                          const NormGradSpec& spec) {
  Operands operands("norm_grad", args, rets);
  NormGradArgs out;
  const bool layernorm = spec.kind == "layernorm";
  operands.Expect(layernorm || spec.kind == "rmsnorm", "kind", "\"rmsnorm\" or \"layernorm\"", spec.kind);
  out.kind = layernorm ? NormKind::kLayerNorm : NormKind::kRMSNorm;
  out.zero_centered_gamma = spec.zero_centered_gamma;

  const Array dy = operands.Arg("dy", kHighPrecision);
  operands.Expect(!dy.shape.empty(), "rank", "at least 1", "0");
  if (operands.ok()) {
    out.rows = Product(dy.shape, 0, dy.shape.size() - 1);
    out.cols = dy.shape.back();
    operands.Expect(out.rows > 0, "number of rows", "at least 1", std::to_string(out.rows));
    operands.Aligned("last dimension", out.cols);
  }
  out.dy = dy.data;
  out.x_dtype = dy.dtype;
  out.x = operands.ArgOf("x", dy.dtype, dy.shape);
  const Array gamma = operands.WithShape(operands.Arg("gamma", kHighPrecision), {out.cols});
  out.gamma = gamma.data;
  out.param_dtype = gamma.dtype;
  const Shape lead(dy.shape.begin(), dy.shape.empty() ? dy.shape.end() : dy.shape.end() - 1);
  if (layernorm) out.mean = operands.ArgOf<float>("mean", DType::kF32, lead);
  out.rstd = operands.ArgOf<float>("rstd", DType::kF32, lead);
  if (spec.residual) out.dres = operands.ArgOf("dres", dy.dtype, dy.shape);

  out.dx = operands.RetOf("dx", dy.dtype, dy.shape);
  out.dgamma = operands.RetOf<float>("dgamma", DType::kF32, {out.cols});
  if (layernorm) out.dbeta = operands.RetOf<float>("dbeta", DType::kF32, {out.cols});
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
