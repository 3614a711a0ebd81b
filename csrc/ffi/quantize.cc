#include "csrc/ffi/quantize.h"

#include <string>

#include "csrc/core/fp8.h"
#include "csrc/core/grouped_args.h"

namespace te_jax {

namespace ffi = xla::ffi;

namespace {

// The results of a pass in block scaling, which has no scale operand.
void DecodeBlocks(Operands& operands, const QuantizingSpec& spec, DType dtype, const Shape& shape, QuantizedOut* out) {
  const bool square = out->scaling == Scaling::kBlock128x128;
  operands.Check(spec.quantizes(), "scaling: expected data or data_t in block scaling, got neither");
  operands.Check(!square || operands.op() == "quantize",
                 "scaling: expected tensor or block_1x128 (only quantize writes 128x128 blocks), got block_128x128");
  operands.Check(!spec.amax && !spec.if_unseeded && spec.margin == 0,
                 "scaling: expected no amax, if_unseeded or margin in block scaling");
  operands.Expect(!operands.ok() || (square ? shape.size() == 2 : !spec.data_t || shape.size() >= 2), "rank",
                  square ? "2 in block_128x128" : "2 or more for data_t", std::to_string(shape.size()));
  if (!operands.ok()) return;
  out->group_rows = shape.size() < 2 ? 1 : shape[shape.size() - 2];
  Shape transposed = {shape.back()};
  transposed.insert(transposed.end(), shape.begin(), shape.end() - 1);
  if (!square && spec.data_t) transposed.back() = NumBlocks(transposed.back()) * kBlock;
  if (spec.hp) out->hp = operands.RetOf("hp", dtype, shape);
  if (spec.data) out->data = operands.RetOf("data", out->format, shape);
  if (spec.data_t) out->data_t = operands.RetOf("data_t", out->format, transposed);
  if (spec.data) {
    out->scale_inv = operands.RetOf<float>("scale_inv", DType::kF32, BlockScaleShape(shape, 1, out->scaling));
  }
  if (spec.data_t) {
    out->scale_inv_t = operands.RetOf<float>("scale_inv_t", DType::kF32,
                                             BlockScaleShape(transposed, transposed.size() - 1, out->scaling));
  }
  if (spec.dbias) out->dbias = operands.RetOf("dbias", out->dbias_dtype, {shape.back()});
}

// The operands and results of a pass with a scale for each group.
void DecodeByGroup(Operands& operands, const QuantizingSpec& spec, const Shape& shape, QuantizedOut* out) {
  const bool ragged = spec.scaling == "group";
  operands.Check(!spec.hp && !spec.dbias, "scaling: expected no hp and no dbias with a scale for each group");
  operands.Expect(spec.groups >= 1 && spec.groups <= kMaxGroups, "groups", "1 to " + std::to_string(kMaxGroups),
                  std::to_string(spec.groups));
  operands.Expect(!operands.ok() || shape.size() == (ragged ? 2u : 3u), "rank", ragged ? "2 in group" : "3 in leading",
                  std::to_string(shape.size()));
  if (!operands.ok()) return;
  operands.Expect(ragged || shape[0] == spec.groups, "x's first dimension", std::to_string(spec.groups),
                  std::to_string(shape[0]));
  const Shape by_group = {spec.groups};
  const Shape transposed = ragged ? Shape{shape[1], PaddedTokens(shape[0])} : Shape{shape[0], shape[2], shape[1]};
  out->groups = spec.groups;
  if (ragged) out->group_sizes = operands.Int32Of("group_sizes", by_group);
  out->scale = operands.ArgOf<float>("scale", DType::kF32, by_group);
  if (spec.data) out->data = operands.RetOf("data", out->format, shape);
  if (spec.data_t) out->data_t = operands.RetOf("data_t", out->format, transposed);
  if (spec.quantizes()) {
    out->scale_used = operands.RetOf<float>("scale", DType::kF32, by_group);
    out->scale_inv = operands.RetOf<float>("scale_inv", DType::kF32, by_group);
  }
  if (spec.amax) out->amax = operands.RetOf<float>("amax", DType::kF32, by_group);
}

bool ByGroup(const QuantizingSpec& spec) { return spec.scaling == "group" || spec.scaling == "leading"; }

}  // namespace

void DecodeRows(Operands& operands, const QuantizingSpec& spec, const Shape& shape, int64_t* rows, int64_t* cols) {
  if (!operands.ok()) return;
  if (!operands.Expect(!shape.empty(), "rank", "at least 1", "0")) return;
  *rows = Product(shape, 0, shape.size() - 1);
  *cols = shape.back();
  operands.Expect(*rows > 0, "number of rows", "at least 1", std::to_string(*rows));
  operands.Aligned("last dimension", *cols);
  // 1x128 blocks are padded to whole ones.
  if (spec.scaling == "leading" && shape.size() == 3) {
    operands.Aligned("number of rows of a group", shape[1]);
  } else if (spec.data_t && spec.scaling != "block_1x128" && spec.scaling != "group") {
    operands.Aligned("number of rows of a tensor that is written transposed", *rows);
  }
}

QuantizedOut DecodeQuantized(Operands& operands, const QuantizingSpec& spec, DType dtype, const Shape& shape) {
  QuantizedOut out;
  operands.Expect(ParseFormat(spec.format, &out.format), "format", "\"e4m3\" or \"e5m2\"", spec.format);
  operands.Expect(spec.margin >= -64 && spec.margin <= 64, "margin", "-64 to 64", std::to_string(spec.margin));
  operands.Expect(ParseDType(spec.dbias_dtype, &out.dbias_dtype) && !IsFP8(out.dbias_dtype), "dbias_dtype",
                  "float32, bfloat16 or float16", spec.dbias_dtype);
  operands.Expect(ByGroup(spec) || ParseScaling(spec.scaling, &out.scaling), "scaling",
                  std::string(kScalings) + ", group or leading", spec.scaling);
  out.power_of_two = spec.power_of_two;
  if (out.scaling != Scaling::kTensor) {
    DecodeBlocks(operands, spec, dtype, shape, &out);
    return out;
  }
  if (spec.if_unseeded) {
    operands.Check(spec.amax && !spec.quantizes() && !spec.hp && !spec.dbias,
                   "if_unseeded: expected a pass that wants amax alone");
  }
  out.margin = static_cast<int32_t>(spec.margin);
  out.if_unseeded = spec.if_unseeded;
  if (ByGroup(spec)) {
    DecodeByGroup(operands, spec, shape, &out);
    return out;
  }
  out.scale = operands.ArgOf<float>("scale", DType::kF32, {});
  if (!operands.ok()) return out;

  Shape transposed = {shape.back()};
  transposed.insert(transposed.end(), shape.begin(), shape.end() - 1);
  if (spec.hp) out.hp = operands.RetOf("hp", dtype, shape);
  if (spec.data) out.data = operands.RetOf("data", out.format, shape);
  if (spec.data_t) out.data_t = operands.RetOf("data_t", out.format, transposed);
  if (spec.quantizes()) {
    out.scale_used = operands.RetOf<float>("scale", DType::kF32, {});
    out.scale_inv = operands.RetOf<float>("scale_inv", DType::kF32, {});
  }
  if (spec.amax) out.amax = operands.RetOf<float>("amax", DType::kF32, {});
  if (spec.dbias) out.dbias = operands.RetOf("dbias", out.dbias_dtype, {shape.back()});
  return out;
}

ffi::ErrorOr<QuantizeArgs> DecodeQuantize(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                          const QuantizeSpec& spec) {
  Operands operands("quantize", args, rets);
  QuantizeArgs out;
  const Array x = operands.Arg("x", kHighPrecision);
  operands.Check(!spec.hp, "hp: it would be a copy of x");
  DecodeRows(operands, spec, x.shape, &out.rows, &out.cols);
  out.x = x.data;
  out.x_dtype = x.dtype;
  out.out = DecodeQuantized(operands, spec, x.dtype, x.shape);
  ffi::Error error = operands.Finish();
  if (error.failure()) return ffi::Unexpected(error);
  return out;
}

}  // namespace te_jax
