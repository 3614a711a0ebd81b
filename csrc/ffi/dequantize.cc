#include "csrc/ffi/dequantize.h"

#include "csrc/core/fp8.h"
#include "csrc/ffi/check.h"

namespace te_jax {

namespace ffi = xla::ffi;

ffi::ErrorOr<DequantizeArgs> DecodeDequantize(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                              const DequantizeSpec& spec) {
  Operands operands("dequantize", args, rets);
  DequantizeArgs out;
  const Array data = operands.Arg("data", {DType::kE4M3, DType::kE5M2});
  operands.Expect(!operands.ok() || !data.shape.empty(), "rank", "at least 1", "0");
  if (operands.ok()) {
    operands.Aligned("last dimension", data.shape.back());
    out.size = Product(data.shape, 0, data.shape.size());
    operands.Expect(out.size > 0, "number of elements", "at least 1", "0");
  }
  out.in_dtype = data.dtype;
  out.data = data.data;
  out.scale_inv = operands.ArgOf<float>("scale_inv", DType::kF32, {});
  operands.Expect(ParseDType(spec.out_dtype, &out.out_dtype) && !IsFP8(out.out_dtype), "out_dtype",
                  "float32, bfloat16 or float16", spec.out_dtype);
  out.out = operands.RetOf("out", out.out_dtype, data.shape);
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
