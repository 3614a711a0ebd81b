// Decoding and checking of custom-call operands, with hand-made call frames.
#include "csrc/ffi/activation.h"
#include "csrc/ffi/dequantize.h"
#include "csrc/ffi/gemm.h"
#include "csrc/ffi/norm.h"
#include "csrc/ffi/norm_grad.h"
#include "csrc/ffi/quantize.h"
#include "csrc/tests/check.h"
#include "csrc/tests/frame.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

QuantizeSpec Data() {
  QuantizeSpec spec{};
  spec.format = "e4m3";
  spec.data = true;
  return spec;
}

const std::vector<Spec> kDataOnly = {{E4M3, {2, 3, 32}}, {F32, {}}, {F32, {}}};

std::string QuantizeError(const std::vector<Spec>& args, const std::vector<Spec>& rets, const QuantizeSpec& spec) {
  const Frame frame(args, rets);
  const auto decoded = DecodeQuantize(frame.args(), frame.rets(), spec);
  return decoded.has_error() ? decoded.error().message() : "";
}

TEST(QuantizeAllResults) {
  QuantizeSpec spec = Data();
  spec.data_t = spec.amax = spec.dbias = true;
  spec.margin = 3;
  const Frame frame({{BF16, {2, 8, 32}}, {F32, {}}},
                    {{E4M3, {2, 8, 32}}, {E4M3, {32, 2, 8}}, {F32, {}}, {F32, {}}, {F32, {}}, {F32, {32}}});
  const auto args = DecodeQuantize(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT_EQ(args->rows, 16);
  EXPECT_EQ(args->cols, 32);
  EXPECT(args->x_dtype == DType::kBF16);
  EXPECT(args->out.format == DType::kE4M3);
  EXPECT_EQ(args->out.margin, 3);
  EXPECT(args->x == frame.arg(0) && args->out.scale == frame.arg(1) && args->out.hp == nullptr);
  EXPECT(args->out.data == frame.ret(0) && args->out.data_t == frame.ret(1));
  EXPECT(args->out.scale_used == frame.ret(2) && args->out.scale_inv == frame.ret(3));
  EXPECT(args->out.amax == frame.ret(4) && args->out.dbias == frame.ret(5));
}

TEST(QuantizeErrors) {
  EXPECT_EQ(QuantizeError({{BF16, {2, 3, 32}}, {F32, {}}}, kDataOnly, Data()).size(), 0u);
  EXPECT_CONTAINS(QuantizeError({{XLA_FFI_DataType_F64, {2, 3, 32}}, {F32, {}}}, kDataOnly, Data()),
                  "te_jax quantize: x dtype: expected float32 or bfloat16 or float16, got XLA type 12");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 32}}, {F32, {1}}}, kDataOnly, Data()),
                  "scale shape: expected [], got [1]");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 32}}, {BF16, {}}}, kDataOnly, Data()),
                  "scale dtype: expected float32, got bfloat16");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 24}}, {F32, {}}}, kDataOnly, Data()),
                  "last dimension: expected a positive multiple of 16, got 24");
  EXPECT_CONTAINS(QuantizeError({{BF16, {0, 3, 32}}, {F32, {}}}, kDataOnly, Data()),
                  "number of rows: expected at least 1, got 0");
  EXPECT_CONTAINS(QuantizeError({{BF16, {}}, {F32, {}}}, kDataOnly, Data()), "rank: expected at least 1, got 0");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 32}}}, kDataOnly, Data()), "operand scale is missing");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 32}}, {F32, {}}, {F32, {}}}, kDataOnly, Data()),
                  "number of operands: expected 2, got 3");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 32}}, {F32, {}}}, {{E4M3, {2, 3, 32}}, {F32, {}}}, Data()),
                  "result scale_inv is missing");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 3, 32}}, {F32, {}}}, {{E5M2, {2, 3, 32}}, {F32, {}}, {F32, {}}}, Data()),
                  "data dtype: expected float8_e4m3fn, got float8_e5m2");
}

TEST(QuantizeAttributeErrors) {
  const std::vector<Spec> args = {{BF16, {2, 3, 32}}, {F32, {}}};
  QuantizeSpec spec = Data();
  spec.format = "e3m4";
  EXPECT_CONTAINS(QuantizeError(args, kDataOnly, spec), "format: expected \"e4m3\" or \"e5m2\", got e3m4");
  spec = Data();
  spec.hp = true;
  EXPECT_CONTAINS(QuantizeError(args, kDataOnly, spec), "hp: it would be a copy of x");
  spec = Data();
  spec.margin = 100;
  EXPECT_CONTAINS(QuantizeError(args, kDataOnly, spec), "margin: expected -64 to 64, got 100");
  spec = Data();
  spec.if_unseeded = true;
  EXPECT_CONTAINS(QuantizeError(args, kDataOnly, spec), "if_unseeded: expected a pass that wants amax alone");
  spec = Data();
  spec.data_t = true;
  EXPECT_CONTAINS(QuantizeError(args, kDataOnly, spec),
                  "written transposed: expected a positive multiple of 16, got 6");
}

TEST(Norm) {
  NormSpec spec{};
  spec.format = "e4m3";
  spec.data = spec.stats = true;
  spec.kind = "layernorm";
  const Frame frame({{BF16, {2, 3, 32}}, {F32, {32}}, {F32, {32}}, {F32, {}}},
                    {{E4M3, {2, 3, 32}}, {F32, {}}, {F32, {}}, {F32, {2, 3}}, {F32, {2, 3}}});
  const auto args = DecodeNorm(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (args.has_value()) {
    EXPECT(args->kind == NormKind::kLayerNorm && args->param_dtype == DType::kF32);
    EXPECT(args->gamma == frame.arg(1) && args->beta == frame.arg(2) && args->out.scale == frame.arg(3));
    EXPECT(args->mean == frame.ret(3) && args->rstd == frame.ret(4));
  }
  spec.kind = "rmsnorm";
  EXPECT_CONTAINS(DecodeNorm(frame.args(), frame.rets(), spec).error().message(),
                  "te_jax norm: scale shape: expected [], got [32]");
  spec.kind = "batchnorm";
  EXPECT_CONTAINS(DecodeNorm(frame.args(), frame.rets(), spec).error().message(), "kind: expected");
}

TEST(NormGrad) {
  NormGradSpec spec{};
  spec.kind = "layernorm";
  spec.residual = true;
  const std::vector<Spec> rets = {{BF16, {2, 3, 32}}, {F32, {32}}, {F32, {32}}};
  const std::vector<Spec> operands = {{BF16, {2, 3, 32}}, {BF16, {2, 3, 32}}, {F32, {32}},
                                      {F32, {2, 3}},      {F32, {2, 3}},      {BF16, {2, 3, 32}}};
  const Frame frame(operands, rets);
  const auto args = DecodeNormGrad(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (args.has_value()) {
    EXPECT(args->rows == 6 && args->cols == 32 && args->kind == NormKind::kLayerNorm);
    EXPECT(args->x_dtype == DType::kBF16 && args->param_dtype == DType::kF32);
    EXPECT(args->dy == frame.arg(0) && args->x == frame.arg(1) && args->gamma == frame.arg(2));
    EXPECT(args->mean == frame.arg(3) && args->rstd == frame.arg(4) && args->dres == frame.arg(5));
    EXPECT(args->dx == frame.ret(0) && args->dgamma == frame.ret(1) && args->dbeta == frame.ret(2));
  }
  spec.residual = false;
  EXPECT_CONTAINS(DecodeNormGrad(frame.args(), frame.rets(), spec).error().message(),
                  "te_jax norm_grad: number of operands: expected 5, got 6");
  spec.kind = "rmsnorm";
  const Frame scalar({{BF16, {}}, {BF16, {}}, {F32, {32}}, {F32, {}}}, {{BF16, {}}, {F32, {32}}});
  EXPECT_CONTAINS(DecodeNormGrad(scalar.args(), scalar.rets(), spec).error().message(),
                  "rank: expected at least 1, got 0");
}

TEST(GatedActivation) {
  ActivationSpec spec{};
  spec.format = "e5m2";
  spec.data = true;
  spec.kind = "swiglu";
  const Frame frame({{BF16, {4, 64}}, {F32, {}}}, {{E5M2, {4, 32}}, {F32, {}}, {F32, {}}});
  const auto args = DecodeActivation(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value() && args->cols == 32 && args->rows == 4);

  ActivationGradSpec grad{};
  grad.format = "e5m2";
  grad.data = grad.dbias = true;
  grad.kind = "swiglu";
  const Frame back({{BF16, {4, 32}}, {BF16, {4, 64}}, {F32, {}}}, {{E5M2, {4, 64}}, {F32, {}}, {F32, {}}, {F32, {64}}});
  const auto grads = DecodeActivationGrad(back.args(), back.rets(), grad);
  EXPECT(grads.has_value() && grads->cols == 32 && grads->out.dbias == back.ret(3));
  grad.kind = "silu";
  EXPECT_CONTAINS(DecodeActivationGrad(back.args(), back.rets(), grad).error().message(),
                  "te_jax activation_grad: x shape: expected [4, 32], got [4, 64]");
}

TEST(ActivationKinds) {
  ActivationSpec spec{};
  spec.format = "e4m3";
  spec.data = true;
  const Frame frame({{BF16, {4, 64}}, {F32, {}}}, {{E4M3, {4, 32}}, {F32, {}}, {F32, {}}});
  spec.kind = "clamped_swiglu";
  spec.gate_second = true;
  spec.limit = 3.0f;
  auto args = DecodeActivation(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  const ActivationDesc clamped = args->activation;
  EXPECT(clamped.function == ActivationFunction::kSiLU && clamped.gated && clamped.gate_second && clamped.clamped);
  EXPECT(clamped.limit == 3.0f && clamped.alpha == 1.702f && clamped.linear_offset == 1.0f);
  spec.limit = 0.0f;
  EXPECT_CONTAINS(DecodeActivation(frame.args(), frame.rets(), spec).error().message(), "limit: expected a positive");

  spec.kind = "qgeglu";  // the parameters of clamped_swiglu are not its own
  args = DecodeActivation(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value() && !args->activation.clamped && args->activation.alpha == 1.702f);
  spec.kind = "swiglu";
  args = DecodeActivation(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value() && args->activation.alpha == 1.0f && args->activation.gate_second);
  spec.kind = "relu";
  EXPECT_CONTAINS(DecodeActivation(frame.args(), frame.rets(), spec).error().message(),
                  "gate_second: expected false for an activation without a gate, got true");
}

TEST(Dequantize) {
  const Frame frame({{E5M2, {4, 32}}, {F32, {}}}, {{BF16, {4, 32}}});
  const auto args = DecodeDequantize(frame.args(), frame.rets(), {"bfloat16"});
  EXPECT(args.has_value() && args->size == 128 && args->in_dtype == DType::kE5M2);
  EXPECT_CONTAINS(DecodeDequantize(frame.args(), frame.rets(), {"float8_e5m2"}).error().message(),
                  "out_dtype: expected float32, bfloat16 or float16, got float8_e5m2");
}

TEST(QuantizeBlocks) {
  QuantizeSpec spec = Data();
  spec.data_t = spec.dbias = true;
  spec.scaling = "block_1x128";
  const std::vector<Spec> rets = {{E4M3, {2, 70, 144}}, {E4M3, {144, 2, 128}}, {F32, {2, 2, 70}}, {F32, {2, 1, 144}},
                                  {F32, {144}}};
  const Frame frame({{BF16, {2, 70, 144}}}, rets);
  const auto args = DecodeQuantize(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT(args->rows == 140 && args->cols == 144 && args->out.group_rows == 70);
  EXPECT_EQ(PaddedRows(args->rows, args->out), 256);
  EXPECT(args->out.scale == nullptr && args->out.scale_used == nullptr && args->out.amax == nullptr);
  EXPECT(args->out.scale_inv == frame.ret(2) && args->out.scale_inv_t == frame.ret(3));

  spec.scaling = "block_128x128";
  const std::vector<Spec> squares = {
      {E4M3, {144, 272}}, {E4M3, {272, 144}}, {F32, {2, 3}}, {F32, {3, 2}}, {F32, {272}}};
  EXPECT_EQ(QuantizeError({{BF16, {144, 272}}}, squares, spec).size(), 0u);
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 8, 144}}}, rets, spec), "rank: expected 2 in block_128x128, got 3");
  EXPECT_CONTAINS(QuantizeError({{BF16, {70, 144}}}, squares, spec), "number of rows of a tensor that is written");
  spec.scaling = "mx";
  EXPECT_CONTAINS(QuantizeError({{BF16, {16, 144}}}, squares, spec), "scaling: expected tensor, block_1x128 or");
  spec.scaling = "block_1x128";
  spec.amax = true;
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 70, 144}}}, rets, spec), "expected no amax, if_unseeded or margin");
  spec = Data();
  spec.scaling = "block_1x128";
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 70, 144}}}, {{E4M3, {2, 70, 144}}, {F32, {70, 2}}}, spec),
                  "scale_inv shape: expected [2, 2, 70], got [70, 2]");
  EXPECT_CONTAINS(QuantizeError({{BF16, {2, 70, 144}}, {F32, {}}}, {{E4M3, {2, 70, 144}}, {F32, {2, 2, 70}}}, spec),
                  "number of operands: expected 1, got 2");
}

TEST(GatedGradientInBlocks) {
  ActivationGradSpec spec{};
  spec.format = "e4m3";
  spec.data = true;
  spec.scaling = "block_1x128";
  spec.kind = "swiglu";
  const Frame frame({{BF16, {8, 144}}, {BF16, {8, 288}}}, {{E4M3, {8, 288}}, {F32, {3, 8}}});
  const auto args = DecodeActivationGrad(frame.args(), frame.rets(), spec);
  EXPECT(args.has_error());
  EXPECT_CONTAINS(args.error().message(), "gated activation in blocks: expected a multiple of 128, got 144");
}

GemmSpec FP8Gemm() {
  GemmSpec spec{};
  spec.fp8 = true;
  spec.contract_dims = 1;
  spec.out_dtype = "bfloat16";
  spec.alpha = 1.0f;
  return spec;
}

std::string GemmError(const std::vector<Spec>& args, const std::vector<Spec>& rets, const GemmSpec& spec) {
  const Frame frame(args, rets);
  const auto decoded = DecodeGemm(frame.args(), frame.rets(), spec);
  return decoded.has_error() ? decoded.error().message() : "";
}

TEST(GemmWithEverything) {
  GemmSpec spec = FP8Gemm();
  spec.contract_dims = 2;
  spec.bias = spec.amax = true;
  spec.beta = 0.5f;
  spec.out_dtype = "float8_e4m3fn";
  const std::vector<Spec> operands = {
      {E4M3, {48, 2, 8}}, {E5M2, {32, 2, 8}}, {F32, {}}, {F32, {}}, {BF16, {32}}, {BF16, {48, 32}}, {F32, {}}};
  const Frame frame(operands, {{E4M3, {48, 32}}, {F32, {}}});
  const auto args = DecodeGemm(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT(args->m == 48 && args->n == 32 && args->k == 16);
  EXPECT(args->lhs_scale_inv == frame.arg(2) && args->rhs_scale_inv == frame.arg(3) && args->bias == frame.arg(4));
  EXPECT(args->c == frame.arg(5) && args->out_scale == frame.arg(6) && args->amax == frame.ret(1));
}

TEST(GemmBlocks) {
  GemmSpec spec = FP8Gemm();
  spec.lhs_scaling = "block_1x128";
  spec.rhs_scaling = "block_128x128";
  const std::vector<Spec> out = {{BF16, {2, 8, 144}}};
  const Spec lhs = {E4M3, {2, 8, 272}}, rhs = {E4M3, {144, 272}}, a = {F32, {3, 2, 8}}, b = {F32, {2, 3}};
  const Frame frame({lhs, rhs, a, b}, out);
  const auto args = DecodeGemm(frame.args(), frame.rets(), spec);
  EXPECT(args.has_value());
  if (!args.has_value()) return;
  EXPECT(args->lhs_scaling == Scaling::kBlock1x128 && args->rhs_scaling == Scaling::kBlock128x128);
  EXPECT(args->lhs_scale_inv == frame.arg(2) && args->rhs_scale_inv == frame.arg(3));
  EXPECT_CONTAINS(GemmError({lhs, rhs, {F32, {}}, b}, out, spec), "lhs_scale_inv shape: expected [3, 2, 8], got []");
  EXPECT_CONTAINS(GemmError({lhs, rhs, a, {F32, {3, 2}}}, out, spec),
                  "rhs_scale_inv shape: expected [2, 3], got [3, 2]");
  EXPECT_CONTAINS(GemmError({{E4M3, {5, 272}}, rhs, a, b}, out, spec),
                  "lhs's number of rows: expected a multiple of 8 in block_1x128, got 5");
  spec.lhs_scaling = "tensor";
  EXPECT_CONTAINS(GemmError({lhs, rhs, a, b}, out, spec), "expected blocks for both operands, got tensor for one");
  spec.lhs_scaling = "block_128x128";
  EXPECT_CONTAINS(GemmError({lhs, rhs, a, b}, out, spec), "expected block_1x128 for one operand, got block_128x128");
  spec.lhs_scaling = "block_1x128";
  spec.fast_accumulation = true;
  EXPECT_CONTAINS(GemmError({lhs, rhs, a, b}, out, spec), "fast_accumulation: expected false");
  spec = FP8Gemm();
  spec.lhs_scaling = spec.rhs_scaling = "block_1x128";
  spec.contract_dims = 2;
  EXPECT_CONTAINS(GemmError({{E4M3, {48, 2, 80}}, {E4M3, {32, 2, 80}}, a, b}, {{BF16, {48, 32}}}, spec),
                  "lhs's last dimension: expected a multiple of 128 where several are contracted, got 80");
  EXPECT_EQ(GemmError({{E4M3, {48, 2, 128}}, {E4M3, {32, 2, 128}}, {F32, {2, 1, 48}}, {F32, {2, 1, 32}}},
                      {{BF16, {48, 32}}}, spec)
                .size(),
            0u);
}

TEST(GemmErrors) {
  const Spec scale = {F32, {}};
  const std::vector<Spec> out = {{BF16, {5, 32}}};
  EXPECT_EQ(GemmError({{E4M3, {5, 64}}, {E4M3, {32, 64}}, scale, scale}, out, FP8Gemm()).size(), 0u);
  EXPECT_CONTAINS(GemmError({{E5M2, {5, 64}}, {E5M2, {32, 64}}, scale, scale}, out, FP8Gemm()),
                  "expected at least one float8_e4m3fn");
  EXPECT_CONTAINS(GemmError({{E4M3, {5, 40}}, {E4M3, {32, 40}}, scale, scale}, out, FP8Gemm()),
                  "te_jax gemm: contracted dimension: expected a positive multiple of 16, got 40");
  EXPECT_CONTAINS(GemmError({{E4M3, {5, 64}}, {E4M3, {24, 64}}, scale, scale}, out, FP8Gemm()),
                  "rhs's kept dimension (the result's last): expected a positive multiple of 16, got 24");
  EXPECT_CONTAINS(GemmError({{E4M3, {5, 64}}, {E4M3, {32, 48}}, scale, scale}, out, FP8Gemm()),
                  "rhs's contracted dimensions: expected [64], got [48]");
  EXPECT_CONTAINS(GemmError({{E4M3, {0, 64}}, {E4M3, {32, 64}}, scale, scale}, out, FP8Gemm()),
                  "lhs's number of rows: expected at least 1, got 0");
  EXPECT_CONTAINS(GemmError({{E4M3, {64}}, {E4M3, {32, 64}}, scale, scale}, out, FP8Gemm()), "lhs rank");
  EXPECT_CONTAINS(GemmError({{BF16, {5, 64}}, {E4M3, {32, 64}}, scale, scale}, out, FP8Gemm()), "lhs dtype");
  GemmSpec spec = FP8Gemm();
  spec.in_place = true;
  EXPECT_CONTAINS(GemmError({{E4M3, {5, 64}}, {E4M3, {32, 64}}, scale, scale}, out, spec), "in_place: expected beta");
  spec = FP8Gemm();
  spec.fp8 = false;
  spec.lhs_contract_first = true;
  EXPECT_CONTAINS(GemmError({{BF16, {64, 5}}, {BF16, {32, 64}}}, out, spec), "lhs's kept dimension, its last one");
  EXPECT_CONTAINS(GemmError({{BF16, {64, 16}}, {F32, {32, 64}}}, out, spec),
                  "rhs dtype: expected bfloat16, got float32");
}

}  // namespace
}  // namespace te_jax

TEST_MAIN
