#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

constexpr int kDbiasCols = 32;  // columns of a block of DbiasKernel, one a lane

__global__ void __launch_bounds__(kThreads)
    FinishAmaxKernel(const float* only_if_zero, const uint32_t* partials, int num_partials, float* amax) {
  __shared__ uint32_t scratch[kWarps];
  AwaitPredecessor();
  const bool skipped = only_if_zero != nullptr && *only_if_zero != 0.0f;
  const uint32_t bits = skipped ? 0 : ReducePartials(partials, num_partials, scratch);
  if (threadIdx.x == 0) *amax = AmaxFromBits(bits);
}

// dbias[c] = sum over tiles of tile_sums[tile, c]; warp w takes tiles w, w + 8, ...
template <class T>
__global__ void __launch_bounds__(kThreads)
    DbiasKernel(int64_t num_row_tiles, int64_t cols, const float* tile_sums, T* dbias) {
  __shared__ float scratch[kWarps][kDbiasCols];
  AwaitPredecessor();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kDbiasCols + lane;
  float sum = 0.0f;
  if (col < cols) {
    // Eight loads on their way at a time, whatever the number of tiles: few tiles cost latency, not bandwidth.
    constexpr int kBatch = 8;
    for (int64_t first = warp; first < num_row_tiles; first += kBatch * kWarps) {
      float values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t tile = first + i * kWarps;
        values[i] = tile < num_row_tiles ? tile_sums[tile * cols + col] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += values[i];
    }
  }
  scratch[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || col >= cols) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += scratch[i][lane];
  dbias[col] = static_cast<T>(sum);  // rounds to nearest even
}

}  // namespace

cudaError_t LaunchFinishAmax(const QuantizedOut& out, const PassWorkspace& workspace, cudaStream_t stream) {
  if (out.amax == nullptr) return cudaSuccess;
  return Launch(FinishAmaxKernel, 1, kThreads, stream, out.if_unseeded ? out.scale : nullptr, workspace.partials,
                workspace.num_partials, out.amax);
}

cudaError_t LaunchDbias(int64_t num_row_tiles, int64_t cols, const float* tile_sums, const QuantizedOut& out,
                        cudaStream_t stream) {
  return DispatchFloat(out.dbias_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto blocks = static_cast<unsigned>((cols + kDbiasCols - 1) / kDbiasCols);
    return Launch(DbiasKernel<T>, blocks, kThreads, stream, num_row_tiles, cols, tile_sums, static_cast<T*>(out.dbias));
  });
}

}  // namespace te_jax::kernels
