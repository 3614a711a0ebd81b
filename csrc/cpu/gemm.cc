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
  Multiply(args, lhs, rhs, product);

  float factor = args.alpha;
  if (args.lhs_scale_inv != nullptr) factor *= *args.lhs_scale_inv;
  if (args.rhs_scale_inv != nullptr) factor *= *args.rhs_scale_inv;
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
