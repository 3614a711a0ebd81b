// What a kernel is asked to do: raw pointers and sizes, decoded and checked once (csrc/ffi), then handed to the
// host kernel (csrc/cpu) or the CUDA launcher (csrc/kernels). No XLA and no CUDA types here.
//
// A null pointer means that the result was not asked for. Shapes are flattened: `rows` is the product of the
// leading dimensions, `cols` the last one.
#ifndef TE_JAX_CORE_ARGS_H_
#define TE_JAX_CORE_ARGS_H_

#include <cstdint>
#include <vector>

namespace te_jax {

enum class DType : int32_t { kF32, kBF16, kF16, kE4M3, kE5M2 };

// One scale for the whole tensor, or one for each block of its last dimension or last two.
enum class Scaling : int32_t { kTensor, kBlock1x128, kBlock128x128 };
constexpr int64_t kBlock = 128;
constexpr int64_t NumBlocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// Results of a pass that can quantize y [rows, cols] (te_jax/primitives/spec.py, QuantizingSpec).
struct QuantizedOut {
  DType format = DType::kE4M3;     // kE4M3 or kE5M2
  const float* scale = nullptr;    // [1] in: > 0 use it; 0 derive it from this tensor's amax; NaN gives NaN data
  void* hp = nullptr;              // [rows, cols] out, the dtype of the first operand
  void* data = nullptr;            // [rows, cols] out, FP8
  void* data_t = nullptr;          // [cols, rows] out, FP8
  float* scale_used = nullptr;     // [1] out
  float* scale_inv = nullptr;      // [1] out
  float* amax = nullptr;           // [1] out
  void* dbias = nullptr;           // [cols] out
  DType dbias_dtype = DType::kF32;
  int32_t margin = 0;
  bool power_of_two = false;
  bool if_unseeded = false;

  // Block scaling: no scale, scale_used and amax. Scales as a GEMM reads them (GemmArgs).
  Scaling scaling = Scaling::kTensor;  // kBlock1x128: data_t [cols, padded rows] is quantized by itself
  float* scale_inv_t = nullptr;        // of the blocks of data_t
  int64_t group_rows = 0;              // rows of the last leading dimension: no block crosses into the next group

  // A scale for each group, kTensor: scale, scale_used, scale_inv and amax are [groups]; no hp, no dbias. group_sizes:
  // ragged groups of rows, and data_t [cols, PaddedTokens(rows)] (csrc/core/grouped_args.h). Null: groups of
  // rows / groups rows, and data_t [groups, cols, rows / groups].
  int64_t groups = 0;
  const int32_t* group_sizes = nullptr;  // [groups]
};

// Rows of data_t in 1x128 blocks: every group is padded to whole blocks.
inline int64_t PaddedRows(int64_t rows, const QuantizedOut& out) {
  return rows / out.group_rows * NumBlocks(out.group_rows) * kBlock;
}

struct QuantizeArgs {
  int64_t rows = 0, cols = 0;
  DType x_dtype = DType::kBF16;
  const void* x = nullptr;  // [rows, cols]
  QuantizedOut out;
};

enum class NormKind : int32_t { kRMSNorm, kLayerNorm };

struct NormArgs {
  int64_t rows = 0, cols = 0;
  NormKind kind = NormKind::kRMSNorm;
  float epsilon = 1e-6f;
  bool zero_centered_gamma = false;
  DType x_dtype = DType::kBF16;
  DType param_dtype = DType::kF32;
  const void* x = nullptr;      // [rows, cols]
  const void* gamma = nullptr;  // [cols]
  const void* beta = nullptr;   // [cols], LayerNorm only
  float* mean = nullptr;        // [rows] out, LayerNorm only
  float* rstd = nullptr;        // [rows] out
  QuantizedOut out;
};

// The gradient of a norm, and with `dres` the sum of it and of the gradient that reaches x past the norm.
struct NormGradArgs {
  int64_t rows = 0, cols = 0;
  NormKind kind = NormKind::kRMSNorm;
  bool zero_centered_gamma = false;
  DType x_dtype = DType::kBF16;  // of dy, x, dres and dx
  DType param_dtype = DType::kF32;
  const void* dy = nullptr;     // [rows, cols]
  const void* x = nullptr;      // [rows, cols]
  const void* gamma = nullptr;  // [cols]
  const float* mean = nullptr;  // [rows], LayerNorm only
  const float* rstd = nullptr;  // [rows]
  const void* dres = nullptr;   // [rows, cols], if there is a residual
  void* dx = nullptr;           // [rows, cols] out
  float* dgamma = nullptr;      // [cols] out
  float* dbeta = nullptr;       // [cols] out, LayerNorm only
};

enum class ActivationFunction : int32_t { kGELU, kSiLU, kReLU, kSquaredReLU, kSigmoid };

// y = act(x). Gated, g and u the halves of x: y = act(g) u; clamped: y = act(min(g, limit)) (u' + linear_offset) with
// u' = u clamped to +-limit. At a limit itself a clamp has the slope 1.
struct ActivationDesc {
  ActivationFunction function = ActivationFunction::kSiLU;
  bool gated = false;
  bool gate_second = false;  // g is the second half of x instead of the first
  bool clamped = false;      // gated only
  float alpha = 1.0f;        // kSiLU: x sigmoid(alpha x)
  float limit = 0.0f, linear_offset = 0.0f;
};

struct ActivationArgs {
  int64_t rows = 0, cols = 0;  // of the result; x is [rows, 2 * cols] when gated
  ActivationDesc activation;
  DType x_dtype = DType::kBF16;
  const void* x = nullptr;
  QuantizedOut out;
};

struct ActivationGradArgs {
  int64_t rows = 0, cols = 0;  // of dy; x and the result are [rows, 2 * cols] when gated
  ActivationDesc activation;
  DType x_dtype = DType::kBF16;  // of dy, x and the result
  const void* dy = nullptr;
  const void* x = nullptr;
  QuantizedOut out;
};

struct DequantizeArgs {
  int64_t size = 0;
  DType in_dtype = DType::kE4M3;
  DType out_dtype = DType::kBF16;
  const void* data = nullptr;
  const float* scale_inv = nullptr;  // [1]
  void* out = nullptr;
};

// out [m, n] = alpha * lhs_scale_inv * rhs_scale_inv * (lhs . rhs) + beta * c + bias, row major.
// lhs is [m, k] (or [k, m] if lhs_contract_first), rhs [n, k] (or [k, n] if rhs_contract_first).
// Block scaling: every 128 steps of k have their own scales: lhs_scale_inv [k blocks, m] for 1x128 blocks,
// [m blocks, k blocks] for 128x128; rhs_scale_inv the same with n.
struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  DType lhs_dtype = DType::kE4M3, rhs_dtype = DType::kE4M3, out_dtype = DType::kBF16;
  DType bias_dtype = DType::kBF16, c_dtype = DType::kBF16;
  bool lhs_contract_first = false, rhs_contract_first = false;
  bool fast_accumulation = false;
  float alpha = 1.0f, beta = 0.0f;
  const void* lhs = nullptr;
  const void* rhs = nullptr;
  Scaling lhs_scaling = Scaling::kTensor, rhs_scaling = Scaling::kTensor;  // both kTensor or none
  const float* lhs_scale_inv = nullptr;                                    // [1] or of blocks, FP8 only
  const float* rhs_scale_inv = nullptr;
  const void* bias = nullptr;            // [n]
  const void* c = nullptr;               // [m, n]; may be equal to out
  const float* out_scale = nullptr;      // [1], FP8 output only
  void* out = nullptr;                   // [m, n]
  float* amax = nullptr;                 // [1] out, FP8 output only
};

// The sum of all ranks' partial results of a collective matmul (csrc/comm), in float32 and in the order of ranks, + bias,
// rounded once.
struct SumPartialsArgs {
  int64_t rows = 0, cols = 0;      // cols a multiple of 8
  int ranks = 0, own = 0;
  const float* partial = nullptr;  // [rows, cols], of the own rank
  const void* slots[16] = {};      // by rank: [rows, cols]; that of the own rank is not read
  const void* bias = nullptr;      // [cols] or null
  DType slot_dtype = DType::kBF16, bias_dtype = DType::kBF16, out_dtype = DType::kBF16;
  const float* out_scale = nullptr;  // [1], FP8 output only
  void* out = nullptr;               // [rows, cols]
  float* amax = nullptr;             // [1] in and out, FP8 output only: the larger of it and max |sum|
};

// FP8 state of `formats.size()` = Q quantizers (csrc/core/state.h); its leaves, float32.
struct StateLeaves {
  int64_t history_len = 0;              // H
  const float* amax_history = nullptr;  // [Q, H]
  const float* scale = nullptr;         // [Q]
  const float* uses = nullptr;          // [Q, 66]
  std::vector<DType> formats;           // [Q]
  int32_t margin = 0;
  bool most_recent = false;  // the scale comes from the newest amax instead of the largest one
};

struct ScaleReadArgs {
  StateLeaves leaves;
  std::vector<float*> scales;  // [Q] of [1] out
};

struct ScaleWriteArgs {
  StateLeaves leaves;
  std::vector<const float*> amaxes;  // [Q] of [1]; null for a quantizer that was not used
  float* amax_history = nullptr;     // [Q, H] out; rows that were not used are 0 in all three
  float* scale = nullptr;            // [Q] out
  float* uses = nullptr;             // [Q, 66] out
};

}  // namespace te_jax

#endif  // TE_JAX_CORE_ARGS_H_
