// With x^ = (x - mean) rstd, g = dy gamma and means over the row (mean 0 and no mean(g) for RMSNorm):
//   dx = rstd (g - x^ mean(g x^) - mean(g)) + dres    dgamma = sum over rows of dy x^    dbeta = sum over rows of dy
//
// Kernels on the stream, in this order:
//   RowKernel     dx, and each block's part of the column sums; reads every operand once. Rows of up to kMaxRowCols
//   or, for wider rows, those of norm_grad_wide.cuh
//   SumKernel     adds up the blocks' column sums, in a fixed order
// Each is launched while the one before it ends (launch.cuh).
#include "csrc/kernels/norm_grad.h"

#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/norm_grad.cuh"
#include "csrc/kernels/norm_grad_wide.cuh"

namespace te_jax::kernels {
namespace {

constexpr int kChunksPerThread = 2;
constexpr int kRowWarps = 16;  // of a block of RowKernel at most
constexpr int kMaxRowCols = kRowWarps * kWarp * kChunksPerThread * kChunk;
constexpr int kStages = 2;     // rows of a group in shared memory; more of them are no faster
static_assert(kStages * 3 * kMaxRowCols * sizeof(float) <= 227 << 10, "the shared memory that a block may have");

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

__device__ inline void Barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A persistent block works on several rows at a time, a group of `warps_per_row` warps on each; a thread keeps to its
// columns, so that their sums stay in registers. Operands of the next rows are on their way to shared memory meanwhile:
// every thread fetches what it will read itself, which needs no barrier.
template <class T, bool kLayer, bool kResidual>
__global__ void __launch_bounds__(kRowWarps* kWarp, 1) RowKernel(NormGradParams<T> params, int warps_per_row) {
  constexpr int kOperands = kResidual ? 3 : 2, kPlanes = kLayer ? 2 : 1;
  extern __shared__ uint4 memory[];  // [groups, kStages, operands, cols]
  __shared__ RowSums scratch[2][kRowWarps];

  const int cols = static_cast<int>(params.cols);
  const int group_threads = warps_per_row * kWarp;
  const int groups = blockDim.x / group_threads, group = threadIdx.x / group_threads;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  T* const staged = reinterpret_cast<T*>(memory) + static_cast<int64_t>(group) * kStages * kOperands * cols;

  int col[kChunksPerThread];
#pragma unroll
  for (int j = 0; j < kChunksPerThread; ++j) col[j] = (j * group_threads + threadIdx.x % group_threads) * kChunk;

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
  AwaitPredecessor();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) fetch(first + stage * step, stage);

  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto fetch_stats = [&](int64_t row) {
    if (row >= params.rows) return;
    if constexpr (kLayer) next_mean = __ldg(params.mean + row);
    next_rstd = __ldg(params.rstd + row);
  };
  fetch_stats(first);

  float gamma[kChunksPerThread][kChunk], dgamma[kChunksPerThread][kChunk] = {};
  float dbeta[kLayer ? kChunksPerThread : 1][kChunk] = {};
#pragma unroll
  for (int j = 0; j < kChunksPerThread; ++j) {
    if (col[j] < cols) LoadGamma(params, col[j], gamma[j]);
  }

  int stage = 0, parity = 0;
  for (int64_t row = first; row < params.rows; row += step) {
    const float mean = next_mean, rstd = next_rstd;
    fetch_stats(row + step);
    __pipeline_wait_prior(kStages - 1);  // all but the newest commits have arrived
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
    fetch(row + kStages * step, stage);
    stage = (stage + 1) % kStages;
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

// Sums of `partials` [count, planes, cols] over its first dimension: a lane for each column, warp w takes w, w + 32, ..
constexpr int kSumWarps = 32;
__global__ void __launch_bounds__(kSumWarps* kWarp)
    SumKernel(const float* partials, int count, int64_t planes_cols, int64_t cols, float* dgamma, float* dbeta) {
  __shared__ float scratch[kSumWarps][kWarp];
  AwaitPredecessor();
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

template <class T, bool kLayer, bool kResidual>
cudaError_t LaunchRows(const NormGradParams<T>& params, int num_sms, int* blocks, cudaStream_t stream) {
  const int64_t cols = params.cols;
  const int warps_per_row = CeilDiv(cols, kWarp * kChunksPerThread * kChunk);
  const int groups = kRowWarps / warps_per_row;
  const auto bytes = static_cast<size_t>(groups * kStages * (kResidual ? 3 : 2) * cols) * sizeof(T);
  *blocks = std::min({CeilDiv(params.rows, groups), num_sms, kMaxBlocks});
  const auto kernel = RowKernel<T, kLayer, kResidual>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  return LaunchWithShared(kernel, *blocks, groups * warps_per_row * kWarp, bytes, stream, params, warps_per_row);
}

template <class T, bool kLayer, bool kResidual>
cudaError_t LaunchTyped(const NormGradArgs& args, void* workspace, cudaStream_t stream) {
  constexpr int kPlanes = kLayer ? 2 : 1;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  NormGradParams<T> params{};
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
  return Launch(SumKernel, CeilDiv(kPlanes * args.cols, kWarp), kSumWarps * kWarp, stream, params.partials, blocks,
                kPlanes * args.cols, args.cols, args.dgamma, args.dbeta);
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
