// norm_grad of rows too wide for RowKernel (norm_grad.cu). Kernels on the stream, which read dy and x twice:
//   RowMeansKernel  mean(g) and mean(g x^) of every row
//   StripKernel     dx, and each block's part of the column sums
#ifndef TE_JAX_KERNELS_NORM_GRAD_WIDE_CUH_
#define TE_JAX_KERNELS_NORM_GRAD_WIDE_CUH_

#include <algorithm>

#include "csrc/kernels/norm_grad.cuh"

namespace te_jax::kernels {

constexpr int kWideThreads = 256;
constexpr int kWideWarps = kWideThreads / kWarp;
constexpr int kStripCols = kWarp * kChunk;  // of a block of StripKernel

// mean(g) and mean(g x^) of wide rows, a block for each.
template <class T, bool kLayer>
__global__ void __launch_bounds__(kWideThreads) RowMeansKernel(NormGradParams<T> params) {
  __shared__ RowSums scratch[kWideWarps];
  AwaitPredecessor();
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const float mean = kLayer ? params.mean[row] : 0.0f, rstd = params.rstd[row];
    RowSums sums;
    for (int64_t col = threadIdx.x * kChunk; col < params.cols; col += kWideThreads * kChunk) {
      float gamma[kChunk], g[kChunk], x_hat[kChunk];
      LoadGamma(params, col, gamma);
      LoadAs<T>(params.dy, row * params.cols + col, g);
      LoadAs<T>(params.x, row * params.cols + col, x_hat);
      Accumulate<kLayer>(gamma, mean, rstd, g, x_hat, sums);
    }
    sums = {WarpSum(sums.g), WarpSum(sums.gx)};
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = sums;
    __syncthreads();
    if (threadIdx.x == 0) {
      sums = {};
      for (const RowSums& part : scratch) sums = {sums.g + part.g, sums.gx + part.gx};
      const float inverse_cols = 1.0f / static_cast<float>(params.cols);
      params.row_means[row] = {sums.g * inverse_cols, sums.gx * inverse_cols};
    }
    __syncthreads();  // scratch may be written again
  }
}

// dx and column sums of wide rows: a block has the columns blockIdx.x * kStripCols onwards, a warp every
// (gridDim.y * kWideWarps)th row of them.
template <class T, bool kLayer, bool kResidual>
__global__ void __launch_bounds__(kWideThreads) StripKernel(NormGradParams<T> params) {
  constexpr int kPlanes = kLayer ? 2 : 1;
  __shared__ float scratch[kWideWarps][kPlanes][kStripCols];
  AwaitPredecessor();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first_col = static_cast<int64_t>(blockIdx.x) * kStripCols, col = first_col + lane * kChunk;
  float gamma[kChunk], dgamma[kChunk] = {}, dbeta[kChunk] = {};
  if (col < params.cols) {
    LoadGamma(params, col, gamma);
    for (int64_t row = blockIdx.y * kWideWarps + warp; row < params.rows; row += gridDim.y * kWideWarps) {
      const int64_t offset = row * params.cols + col;
      const float2 means = params.row_means[row];
      const float mean = kLayer ? params.mean[row] : 0.0f, rstd = params.rstd[row];
      float dy[kChunk], x_hat[kChunk], dx[kChunk], dres[kChunk] = {};
      LoadAs<T>(params.dy, offset, dy);
      LoadAs<T>(params.x, offset, x_hat);
      if constexpr (kResidual) LoadAs<T>(params.dres, offset, dres);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        x_hat[i] = (kLayer ? x_hat[i] - mean : x_hat[i]) * rstd;
        dgamma[i] += dy[i] * x_hat[i];
        dbeta[i] += dy[i];
        dx[i] = InputGrad<kLayer>(dy[i] * gamma[i], x_hat[i], means.x, means.y, rstd) + dres[i];
      }
      StoreRounded(dx, params.dx + offset);
    }
  }
  StoreRounded(dgamma, scratch[warp][0] + lane * kChunk);
  if constexpr (kLayer) StoreRounded(dbeta, scratch[warp][1] + lane * kChunk);
  __syncthreads();
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int64_t c = first_col + threadIdx.x;
    if (c >= params.cols) continue;
    float sum = 0.0f;
    for (int i = 0; i < kWideWarps; ++i) sum += scratch[i][plane][threadIdx.x];
    params.partials[(blockIdx.y * kPlanes + plane) * params.cols + c] = sum;
  }
}
static_assert(kStripCols == kWideThreads, "a thread adds up one column");

template <class T, bool kLayer, bool kResidual>
cudaError_t LaunchWide(const NormGradParams<T>& params, int num_sms, int* blocks, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 8;
  const auto row_blocks = static_cast<unsigned>(std::min<int64_t>(params.rows, kBlocksPerSm * num_sms));
  const cudaError_t error = Launch(RowMeansKernel<T, kLayer>, row_blocks, kWideThreads, stream, params);
  if (error != cudaSuccess) return error;
  const int strips = CeilDiv(params.cols, kStripCols);
  *blocks = std::min({CeilDiv(params.rows, kWideWarps), CeilDiv(kBlocksPerSm * num_sms, strips), kMaxBlocks});
  return Launch(StripKernel<T, kLayer, kResidual>, dim3(strips, *blocks), kWideThreads, stream, params);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_NORM_GRAD_WIDE_CUH_
