#include <algorithm>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/math.h"
#include "csrc/cpu/rows.h"

namespace te_jax::cpu {

// With x^ = (x - mean) rstd, g = dy gamma and means over the row (mean 0 and no mean(g) for RMSNorm):
//   dx = rstd (g - x^ mean(g x^) - mean(g)) + dres, rounded once    dgamma = sum dy x^    dbeta = sum dy
bool NormGrad(const NormGradArgs& args) {
  const int64_t cols = args.cols;
  const bool layernorm = args.kind == NormKind::kLayerNorm;
  const Scratch<float> memory(5 * cols);
  const Scratch<double> sums(2 * cols);
  if (!memory || !sums) return false;
  float* gamma = memory.get();
  float *dy = gamma + cols, *x_hat = dy + cols, *g = x_hat + cols, *dres = g + cols;
  double *dgamma = sums.get(), *dbeta = dgamma + cols;
  std::fill(dgamma, dgamma + 2 * cols, 0.0);
  LoadRow(args.gamma, args.param_dtype, 0, cols, gamma);
  if (args.zero_centered_gamma) {
    for (int64_t c = 0; c < cols; ++c) gamma[c] += 1.0f;
  }

  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t offset = row * cols;
    const float mean = layernorm ? args.mean[row] : 0.0f, rstd = args.rstd[row];
    LoadRow(args.dy, args.x_dtype, offset, cols, dy);
    LoadRow(args.x, args.x_dtype, offset, cols, x_hat);
    for (int64_t c = 0; c < cols; ++c) x_hat[c] = (x_hat[c] - mean) * rstd;
    for (int64_t c = 0; c < cols; ++c) g[c] = dy[c] * gamma[c];
    for (int64_t c = 0; c < cols; ++c) dgamma[c] += dy[c] * x_hat[c];
    const float mean_gx = Sum(cols, [&](int64_t c) { return g[c] * x_hat[c]; }) / static_cast<float>(cols);
    float mean_g = 0.0f;
    if (layernorm) {
      for (int64_t c = 0; c < cols; ++c) dbeta[c] += dy[c];
      mean_g = Sum(cols, [&](int64_t c) { return g[c]; }) / static_cast<float>(cols);
    }
    for (int64_t c = 0; c < cols; ++c) g[c] = (g[c] - x_hat[c] * mean_gx - mean_g) * rstd;
    if (args.dres != nullptr) {
      LoadRow(args.dres, args.x_dtype, offset, cols, dres);
      for (int64_t c = 0; c < cols; ++c) g[c] += dres[c];
    }
    StoreRow(g, cols, args.x_dtype, args.dx, offset);
  }
  for (int64_t c = 0; c < cols; ++c) args.dgamma[c] = static_cast<float>(dgamma[c]);
  if (layernorm) {
    for (int64_t c = 0; c < cols; ++c) args.dbeta[c] = static_cast<float>(dbeta[c]);
  }
  return true;
}

}  // namespace te_jax::cpu
