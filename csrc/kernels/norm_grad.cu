// With x^ = (x - mean) rstd, g = dy gamma and means over the row (mean 0 and no mean(g) for RMSNorm):
//   dx = rstd (g - x^ mean(g x^) - mean(g)) + dres    dgamma = sum over rows of dy x^    dbeta = sum over rows of dy
//
// Kernels on the stream, in this order:
//   RowKernel     dx, and each block's part of the column sums; reads every operand once. Rows of up to kMaxRowCols
//   or, for wider rows: RowMeansKernel, then StripKernel, which read dy and x twice
//   SumKernel     adds up the blocks' column sums, in a fixed order
#include "csrc/kernels/norm_grad.h"

#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/reduce.cuh"
#include "csrc/kernels/vector.cuh"

namespace te_jax::kernels {
namespace {

constexpr int kChunk = 8;        // columns that a thread loads at once: 16 bytes of a 16-bit dtype
constexpr int kChunksPerThread = 2;
constexpr int kMaxBlocks = 160;  // parts of the column sums at most: a block for every multiprocessor
constexpr int kRowWarps = 16;    // of a block of RowKernel at most
constexpr int kMaxRowCols = kRowWarps * kWarp * kChunksPerThread * kChunk;
constexpr int kMaxStages = 4;
constexpr int64_t kStageBytes = 224 << 10;  // of the 227 KiB of shared memory that a block may have

template <class T>
struct Params {
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
__device__ inline void LoadGamma(const Params<T>& params, int64_t col, float (&out)[kChunk]) {
  switch (params.gamma_dtype) {
    case DType::kBF16: LoadAs<BF16>(params.gamma, col, out); break;
    case DType::kF16: LoadAs<F16>(params.gamma, col, out); break;
    default: LoadAs<float>(params.gamma, col, out);
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out[i] += params.gamma_offset;
}

// One chunk of global memory to shared memory, in the background.
template <class T>
__device__ inline void CopyAsync(T* target, const T* source) {
#pragma unroll
  for (int i = 0; i < Chunk<T, kChunk>::kVectors; ++i) {
    __pipeline_memcpy_async(reinterpret_cast<uint4*>(target) + i, reinterpret_cast<const uint4*>(source) + i,
                            sizeof(uint4));
  }
}

template <class T>
__device__ inline void LoadShared(const T* source, float (&out)[kChunk]) {
  Chunk<T, kChunk> chunk;
#pragma unroll
  for (int i = 0; i < chunk.kVectors; ++i) chunk.vector[i] = reinterpret_cast<const uint4*>(source)[i];
  Unpack(chunk, out);
}

// Waits until all but the `newest` last commits of this thread have arrived.
__device__ inline void WaitForAllBut(int newest) {
  static_assert(kMaxStages == 4);
  switch (newest) {
    case 1: __pipeline_wait_prior(1); break;
    case 2: __pipeline_wait_prior(2); break;
    default: __pipeline_wait_prior(3);
  }
}

__device__ inline void Barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// A persistent block works on several rows at a time, a group of `warps_per_row` warps on each; a thread keeps to its
// columns, so that their sums stay in registers. Operands of the next rows are on their way to shared memory meanwhile:
// every thread fetches what it will read itself, which needs no barrier.
template <class T, bool kLayer, bool kResidual>
__global__ void __launch_bounds__(kRowWarps* kWarp, 1) RowKernel(Params<T> params, int warps_per_row, int stages) {
  constexpr int kOperands = kResidual ? 3 : 2, kPlanes = kLayer ? 2 : 1;
  extern __shared__ uint4 memory[];  // [groups, stages, operands, cols]
  __shared__ RowSums scratch[2][kRowWarps];

  const int cols = static_cast<int>(params.cols);
  const int group_threads = warps_per_row * kWarp;
  const int groups = blockDim.x / group_threads, group = threadIdx.x / group_threads;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  T* const staged = reinterpret_cast<T*>(memory) + static_cast<int64_t>(group) * stages * kOperands * cols;

  int col[kChunksPerThread];
  float gamma[kChunksPerThread][kChunk], dgamma[kChunksPerThread][kChunk] = {};
  float dbeta[kLayer ? kChunksPerThread : 1][kChunk] = {};
#pragma unroll
  for (int j = 0; j < kChunksPerThread; ++j) {
    col[j] = (j * group_threads + threadIdx.x % group_threads) * kChunk;
    if (col[j] < cols) LoadGamma(params, col[j], gamma[j]);
  }

  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups + group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const auto fetch = [&](int64_t row, int stage) {
#pragma unroll
    for (int j = 0; j < kChunksPerThread; ++j) {
      if (row >= params.rows || col[j] >= cols) continue;
      const int64_t offset = row * cols + col[j];
      T* target = staged + stage * kOperands * cols + col[j];
      CopyAsync(target, params.dy + offset);
      CopyAsync(target + cols, params.x + offset);
      if constexpr (kResidual) CopyAsync(target + 2 * cols, params.dres + offset);
    }
    __pipeline_commit();  // of an empty set too: they are counted
  };
  for (int stage = 0; stage < stages; ++stage) fetch(first + stage * step, stage);

  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto fetch_stats = [&](int64_t row) {
    if (row >= params.rows) return;
    if constexpr (kLayer) next_mean = __ldg(params.mean + row);
    next_rstd = __ldg(params.rstd + row);
  };
  fetch_stats(first);

  int stage = 0, parity = 0;
  for (int64_t row = first; row < params.rows; row += step) {
    const float mean = next_mean, rstd = next_rstd;
    fetch_stats(row + step);
    WaitForAllBut(stages - 1);
    const T* const operands = staged + stage * kOperands * cols;
    float g[kChunksPerThread][kChunk], x_hat[kChunksPerThread][kChunk];
    RowSums sums;
#pragma unroll
    for (int j = 0; j < kChunksPerThread; ++j) {
      if (col[j] >= cols) continue;
      float dy[kChunk];
      LoadShared(operands + col[j], dy);
      LoadShared(operands + cols + col[j], x_hat[j]);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) g[j][i] = dy[i];
      Accumulate<kLayer>(gamma[j], mean, rstd, g[j], x_hat[j], sums);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        dgamma[j][i] += dy[i] * x_hat[j][i];
        if constexpr (kLayer) dbeta[j][i] += dy[i];
      }
    }
    sums = {kLayer ? WarpSum(sums.g) : 0.0f, WarpSum(sums.gx)};
    if (warps_per_row > 1) {
      if (lane == 0) scratch[parity][warp] = sums;
      Barrier(1 + group, group_threads);
      sums = {};
      for (int i = 0; i < warps_per_row; ++i) {
        if constexpr (kLayer) sums.g += scratch[parity][group * warps_per_row + i].g;
        sums.gx += scratch[parity][group * warps_per_row + i].gx;
      }
      parity ^= 1;  // what is read here is written again after the next barrier only
    }
    const float mean_g = sums.g * inverse_cols, mean_gx = sums.gx * inverse_cols;
#pragma unroll
    for (int j = 0; j < kChunksPerThread; ++j) {
      if (col[j] >= cols) continue;
      float dx[kChunk], dres[kChunk] = {};
      if constexpr (kResidual) LoadShared(operands + 2 * cols + col[j], dres);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        dx[i] = InputGrad<kLayer>(g[j][i], x_hat[j][i], mean_g, mean_gx, rstd) + dres[i];
      }
      StoreRounded(dx, params.dx + row * cols + col[j]);
    }
    fetch(row + stages * step, stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

  // The groups' sums, through the shared memory that is free now, to the block's.
  __pipeline_wait_prior(0);
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(memory);  // [groups, planes, cols]
  float* const own = sums + static_cast<int64_t>(group) * kPlanes * cols;
#pragma unroll
  for (int j = 0; j < kChunksPerThread; ++j) {
    if (col[j] >= cols) continue;
    StoreRounded(dgamma[j], own + col[j]);
    if constexpr (kLayer) StoreRounded(dbeta[j], own + cols + col[j]);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kPlanes * cols; c += blockDim.x) {
    float sum = 0.0f;
    for (int i = 0; i < groups; ++i) sum += sums[i * kPlanes * cols + c];
    params.partials[static_cast<int64_t>(blockIdx.x) * kPlanes * cols + c] = sum;
  }
}

constexpr int kWideThreads = 256;
constexpr int kWideWarps = kWideThreads / kWarp;
constexpr int kStripCols = kWarp * kChunk;  // of a block of StripKernel

// mean(g) and mean(g x^) of wide rows, a block for each.
template <class T, bool kLayer>
__global__ void __launch_bounds__(kWideThreads) RowMeansKernel(Params<T> params) {
  __shared__ RowSums scratch[kWideWarps];
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
__global__ void __launch_bounds__(kWideThreads) StripKernel(Params<T> params) {
  constexpr int kPlanes = kLayer ? 2 : 1;
  __shared__ float scratch[kWideWarps][kPlanes][kStripCols];
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

// Sums of `partials` [count, planes, cols] over its first dimension; a lane for each column, warp w takes w, w + 32, ...
constexpr int kSumWarps = 32;
__global__ void __launch_bounds__(kSumWarps* kWarp)
    SumKernel(const float* partials, int count, int64_t planes_cols, int64_t cols, float* dgamma, float* dbeta) {
  __shared__ float scratch[kSumWarps][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (c < planes_cols) {
#pragma unroll
    for (int i = 0; i < kMaxBlocks / kSumWarps; ++i) {
      const int part = warp + i * kSumWarps;
      if (part < count) sum += __ldg(partials + part * planes_cols + c);
    }
  }
  scratch[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= planes_cols) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSumWarps; ++i) sum += scratch[i][lane];
  *(c < cols ? dgamma + c : dbeta + (c - cols)) = sum;
}
static_assert(kMaxBlocks % kSumWarps == 0);

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

template <class T, bool kLayer, bool kResidual>
cudaError_t LaunchRows(const Params<T>& params, int num_sms, int* blocks, cudaStream_t stream) {
  const int64_t cols = params.cols;
  const int warps_per_row = CeilDiv(cols, kWarp * kChunksPerThread * kChunk);
  const int groups = kRowWarps / warps_per_row;
  const int64_t stage_bytes = groups * (kResidual ? 3 : 2) * cols * sizeof(T);
  const int stages = static_cast<int>(std::clamp<int64_t>(kStageBytes / stage_bytes, 2, kMaxStages));
  const auto bytes = static_cast<size_t>(stages * stage_bytes);
  *blocks = std::min({CeilDiv(params.rows, groups), num_sms, kMaxBlocks});
  const auto kernel = RowKernel<T, kLayer, kResidual>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  kernel<<<*blocks, groups * warps_per_row * kWarp, bytes, stream>>>(params, warps_per_row, stages);
  return cudaGetLastError();
}

template <class T, bool kLayer, bool kResidual>
cudaError_t LaunchWide(const Params<T>& params, int num_sms, int* blocks, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 8;
  const auto row_blocks = static_cast<unsigned>(std::min<int64_t>(params.rows, kBlocksPerSm * num_sms));
  RowMeansKernel<T, kLayer><<<row_blocks, kWideThreads, 0, stream>>>(params);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int strips = CeilDiv(params.cols, kStripCols);
  *blocks = std::min({CeilDiv(params.rows, kWideWarps), CeilDiv(kBlocksPerSm * num_sms, strips), kMaxBlocks});
  StripKernel<T, kLayer, kResidual><<<dim3(strips, *blocks), kWideThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class T, bool kLayer, bool kResidual>
cudaError_t LaunchTyped(const NormGradArgs& args, void* workspace, cudaStream_t stream) {
  constexpr int kPlanes = kLayer ? 2 : 1;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  Params<T> params{};
  params.rows = args.rows;
  params.cols = args.cols;
  params.dy = static_cast<const T*>(args.dy);
  params.x = static_cast<const T*>(args.x);
  params.dres = static_cast<const T*>(args.dres);
  params.gamma = args.gamma;
  params.gamma_dtype = args.param_dtype;
  params.gamma_offset = args.zero_centered_gamma ? 1.0f : 0.0f;
  params.mean = args.mean;
  params.rstd = args.rstd;
  params.dx = static_cast<T*>(args.dx);
  params.partials = static_cast<float*>(workspace);
  params.row_means = reinterpret_cast<float2*>(params.partials + kMaxBlocks * kPlanes * args.cols);

  int blocks = 0;
  error = args.cols <= kMaxRowCols ? LaunchRows<T, kLayer, kResidual>(params, num_sms, &blocks, stream)
                                   : LaunchWide<T, kLayer, kResidual>(params, num_sms, &blocks, stream);
  if (error != cudaSuccess) return error;
  SumKernel<<<CeilDiv(kPlanes * args.cols, kWarp), kSumWarps * kWarp, 0, stream>>>(
      params.partials, blocks, kPlanes * args.cols, args.cols, args.dgamma, args.dbeta);
  return cudaGetLastError();
}

}  // namespace

size_t NormGradWorkspaceBytes(const NormGradArgs& args) {
  const int64_t planes = args.kind == NormKind::kLayerNorm ? 2 : 1;
  const int64_t row_means = args.cols <= kMaxRowCols ? 0 : args.rows;
  return static_cast<size_t>(kMaxBlocks * planes * args.cols) * sizeof(float) +
         static_cast<size_t>(row_means) * sizeof(float2);
}

cudaError_t LaunchNormGrad(const NormGradArgs& args, void* workspace, cudaStream_t stream) {
  return DispatchFloat(args.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto layer) {
      return args.dres != nullptr ? LaunchTyped<T, layer(), true>(args, workspace, stream)
                                  : LaunchTyped<T, layer(), false>(args, workspace, stream);
    };
    return args.kind == NormKind::kLayerNorm ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

}  // namespace te_jax::kernels
