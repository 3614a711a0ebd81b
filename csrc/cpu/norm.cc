#include <cmath>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/math.h"
#include "csrc/cpu/quantized.h"

namespace te_jax::cpu {

// RMSNorm:   y = x * rstd * gamma,                 rstd = 1 / sqrt(mean(x^2) + epsilon)
// LayerNorm: y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(mean((x - mean)^2) + epsilon)
bool Norm(const NormArgs& args) {
  if (SkipSeeded(args.out)) return true;
  const int64_t cols = args.cols;
  const bool layernorm = args.kind == NormKind::kLayerNorm;
  const Scratch<float> gamma_scratch(cols), beta_scratch(cols), x_scratch(cols);
  if (!gamma_scratch || !beta_scratch || !x_scratch) return false;
  float *gamma = gamma_scratch.get(), *beta = beta_scratch.get(), *x = x_scratch.get();
  LoadRow(args.gamma, args.param_dtype, 0, cols, gamma);
  if (layernorm) LoadRow(args.beta, args.param_dtype, 0, cols, beta);
  if (args.zero_centered_gamma) {
    for (int64_t c = 0; c < cols; ++c) gamma[c] += 1.0f;
  }

  return ProduceAndWrite(args.rows, cols, args.x_dtype, args.out, [&](int64_t row, float* y) {
    LoadRow(args.x, args.x_dtype, row * cols, cols, x);
    if (layernorm) {
      const float mean = Sum(cols, [&](int64_t c) { return x[c]; }) / static_cast<float>(cols);
      for (int64_t c = 0; c < cols; ++c) x[c] -= mean;
      if (args.mean != nullptr) args.mean[row] = mean;
    }
    const float mean_square = Sum(cols, [&](int64_t c) { return x[c] * x[c]; }) / static_cast<float>(cols);
    const float rstd = 1.0f / std::sqrt(mean_square + args.epsilon);
    if (args.rstd != nullptr) args.rstd[row] = rstd;
    for (int64_t c = 0; c < cols; ++c) y[c] = x[c] * rstd * gamma[c];
    if (layernorm) {
      for (int64_t c = 0; c < cols; ++c) y[c] += beta[c];
    }
  });
}

}  // namespace te_jax::cpu
