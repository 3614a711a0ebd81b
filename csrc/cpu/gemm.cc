#include <algorithm>
#include <atomic>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/quantized.h"
#include "csrc/cpu/rows.h"

namespace te_jax::cpu {
namespace {

std::atomic<SgemmFn> g_sgemm{nullptr};

// An operand as fp32: itself, or a converted copy in `scratch`. Null where memory can't be had.
const float* AsF32(const void* data, DType dtype, int64_t size, Scratch<float>& scratch) {
  if (dtype == DType::kF32) return static_cast<const float*>(data);
  scratch = Scratch<float>(size);
  if (scratch) LoadRow(data, dtype, 0, size, scratch.get());
  return scratch.get();
}

// out [m, n] = lhs . rhs, row major. BLAS is column major, so it is asked for out^T [n, m] = rhs . lhs^T, where
// a row-major [n, k] is a column-major [k, n] (to be transposed) and a row-major [k, n] a column-major [n, k].
void Multiply(const GemmArgs& args, const float* lhs, const float* rhs, float* out) {
  char trans_rhs = args.rhs_contract_first ? 'N' : 'T';
  char trans_lhs = args.lhs_contract_first ? 'T' : 'N';
  int m = static_cast<int>(args.m), n = static_cast<int>(args.n), k = static_cast<int>(args.k);
  int ld_rhs = args.rhs_contract_first ? n : k;
  int ld_lhs = args.lhs_contract_first ? m : k;
  float one = 1.0f, zero = 0.0f;
  g_sgemm.load()(&trans_rhs, &trans_lhs, &n, &m, &k, &one, const_cast<float*>(rhs), &ld_rhs, const_cast<float*>(lhs),
                 &ld_lhs, &zero, out, &n);
}

// The scale of `row` of an operand of `rows` rows, and of a block of its k.
float BlockScale(const float* scale_inv, Scaling scaling, int64_t rows, int64_t k, int64_t row, int64_t block) {
  return scaling == Scaling::kBlock1x128 ? scale_inv[block * rows + row]
                                         : scale_inv[row / kBlock * NumBlocks(k) + block];
}

// out [m, n] = the sum over blocks of k of (lhs . rhs over the block) * lhs's scale * rhs's scale. `part` [m, n] and
// `rhs_scales` [n] are scratch. One scale after the other: the product of two small ones would be subnormal.
void MultiplyBlocks(const GemmArgs& args, const float* lhs, const float* rhs, float* out, float* part,
                    float* rhs_scales) {
  char trans = 'T', none = 'N';
  int m = static_cast<int>(args.m), n = static_cast<int>(args.n), k = static_cast<int>(args.k);
  float one = 1.0f, zero = 0.0f;
  std::fill(out, out + args.m * args.n, 0.0f);
  for (int64_t block = 0; block < NumBlocks(args.k); ++block) {
    int steps = static_cast<int>(std::min(kBlock, args.k - block * kBlock));
    g_sgemm.load()(&trans, &none, &n, &m, &steps, &one, const_cast<float*>(rhs) + block * kBlock, &k,
                   const_cast<float*>(lhs) + block * kBlock, &k, &zero, part, &n);
    for (int64_t j = 0; j < args.n; ++j) {
      rhs_scales[j] = BlockScale(args.rhs_scale_inv, args.rhs_scaling, args.n, args.k, j, block);
    }
    for (int64_t i = 0; i < args.m; ++i) {
      const float lhs_scale = BlockScale(args.lhs_scale_inv, args.lhs_scaling, args.m, args.k, i, block);
      const float* from = part + i * args.n;
      float* to = out + i * args.n;
      for (int64_t j = 0; j < args.n; ++j) to[j] += from[j] * lhs_scale * rhs_scales[j];
    }
  }
}

// y = factor * y + beta * c + bias, one row of n.
struct Epilogue {
  const GemmArgs& args;
  float factor;
  const float* bias;  // [n] or null
  float* c;           // [n], scratch

  void Apply(int64_t row, float* y) const {
    const int64_t n = args.n;
    for (int64_t i = 0; i < n; ++i) y[i] *= factor;
    if (args.beta != 0.0f) {
      LoadRow(args.c, args.c_dtype, row * n, n, c);
      for (int64_t i = 0; i < n; ++i) y[i] += args.beta * c[i];
    }
    if (bias != nullptr) {
      for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
    }
  }
};

}  // namespace

void SetSgemm(SgemmFn sgemm) { g_sgemm = sgemm; }
bool HasSgemm() { return g_sgemm.load() != nullptr; }

bool Gemm(const GemmArgs& args) {
  const int64_t m = args.m, n = args.n, k = args.k;
  Scratch<float> lhs_scratch(0), rhs_scratch(0), bias_scratch(0);
  const float* lhs = AsF32(args.lhs, args.lhs_dtype, m * k, lhs_scratch);
  const float* rhs = AsF32(args.rhs, args.rhs_dtype, n * k, rhs_scratch);
  const float* bias = args.bias == nullptr ? nullptr : AsF32(args.bias, args.bias_dtype, n, bias_scratch);
  const bool in_out = args.out_dtype == DType::kF32 && args.out != args.c;  // accumulate where the result goes
  const Scratch<float> own(in_out ? 0 : m * n), c(args.beta != 0.0f ? n : 0);
  if (lhs == nullptr || rhs == nullptr || (args.bias != nullptr && bias == nullptr) || !own || !c) return false;
  float* product = in_out ? static_cast<float*>(args.out) : own.get();
  const bool blocks = args.lhs_scaling != Scaling::kTensor;
  const Scratch<float> part(blocks ? m * n : 0), rhs_scales(blocks ? n : 0);
  if (!part || !rhs_scales) return false;
  if (blocks) {
    MultiplyBlocks(args, lhs, rhs, product, part.get(), rhs_scales.get());
  } else {
    Multiply(args, lhs, rhs, product);
  }

  float factor = args.alpha;
  if (args.lhs_scale_inv != nullptr && !blocks) factor *= *args.lhs_scale_inv;
  if (args.rhs_scale_inv != nullptr && !blocks) factor *= *args.rhs_scale_inv;
  const Epilogue epilogue{args, factor, bias, c.get()};
  uint32_t amax_bits = 0;
  for (int64_t row = 0; row < m; ++row) {
    float* y = product + row * n;
    epilogue.Apply(row, y);
    if (args.amax != nullptr) amax_bits = AmaxBits(y, n, amax_bits);
    if (IsFP8(args.out_dtype)) {
      EncodeRow(y, n, *args.out_scale, args.out_dtype, static_cast<uint8_t*>(args.out) + row * n);
    } else if (!in_out) {
      StoreRow(y, n, args.out_dtype, args.out, row * n);
    }
  }
  if (args.amax != nullptr) *args.amax = FloatOf(amax_bits);
  return true;
}

}  // namespace te_jax::cpu
