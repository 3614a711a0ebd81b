// What the kernels of norm_grad.cu and norm_grad_wide.cuh share.
#ifndef TE_JAX_KERNELS_NORM_GRAD_CUH_
#define TE_JAX_KERNELS_NORM_GRAD_CUH_

#include "csrc/core/args.h"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/reduce.cuh"
#include "csrc/kernels/vector.cuh"

namespace te_jax::kernels {

constexpr int kChunk = 8;        // columns that a thread loads at once: 16 bytes of a 16-bit dtype
constexpr int kMaxBlocks = 160;  // parts of the column sums at most: a block for every multiprocessor

template <class T>
struct NormGradParams {
  int64_t rows, cols;
  const T* dy;
  const T* x;
  const T* dres;
  const void* gamma;
  DType gamma_dtype;
  float gamma_offset;  // 1 if gamma is zero-centred
  const float* mean;
  const float* rstd;
  T* dx;
  float* partials;    // [blocks, planes, cols]: sums of dy x^ and, for LayerNorm, of dy
  float2* row_means;  // [rows]: mean(g), mean(g x^), where rows are wide
};

template <class T>
__device__ inline void LoadAs(const void* values, int64_t col, float (&out)[kChunk]) {
  Chunk<T, kChunk> chunk;
  chunk.Load(static_cast<const T*>(values) + col);
  Unpack(chunk, out);
}

template <class T>
__device__ inline void LoadGamma(const NormGradParams<T>& params, int64_t col, float (&out)[kChunk]) {
  switch (params.gamma_dtype) {
    case DType::kBF16: LoadAs<BF16>(params.gamma, col, out); break;
    case DType::kF16: LoadAs<F16>(params.gamma, col, out); break;
    default: LoadAs<float>(params.gamma, col, out);
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out[i] += params.gamma_offset;
}

// What a chunk adds to the row's sums: dy and x become x^ and g.
struct RowSums {
  float g = 0.0f, gx = 0.0f;
};
template <bool kLayer>
__device__ inline void Accumulate(const float (&gamma)[kChunk], float mean, float rstd, float (&dy_to_g)[kChunk],
                                  float (&x_to_x_hat)[kChunk], RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    x_to_x_hat[i] = (kLayer ? x_to_x_hat[i] - mean : x_to_x_hat[i]) * rstd;
    dy_to_g[i] *= gamma[i];
    if constexpr (kLayer) sums.g += dy_to_g[i];
    sums.gx += dy_to_g[i] * x_to_x_hat[i];
  }
}

template <bool kLayer>
__device__ inline float InputGrad(float g, float x_hat, float mean_g, float mean_gx, float rstd) {
  return (g - x_hat * mean_gx - (kLayer ? mean_g : 0.0f)) * rstd;
}

inline int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_NORM_GRAD_CUH_
