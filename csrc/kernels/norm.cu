#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

// gamma or beta, in any of the three dtypes.
struct Param {
  const void* values;
  DType dtype;

  __device__ void Load(int64_t col, float (&out)[kChunk]) const {
    switch (dtype) {
      case DType::kBF16: return LoadAs<BF16>(col, out);
      case DType::kF16: return LoadAs<F16>(col, out);
      default: return LoadAs<float>(col, out);
    }
  }
  template <class T>
  __device__ void LoadAs(int64_t col, float (&out)[kChunk]) const {
    Chunk<T, kChunk> chunk;
    chunk.Load(static_cast<const T*>(values) + col);
    Unpack(chunk, out);
  }
};

// y = (x - mean) * rstd * gamma + beta; mean and beta are LayerNorm's only.
template <class T, bool kLayer>
struct NormLoader {
  using Element = T;
  static constexpr int kOutputs = 1;
  struct Fragment {
    Chunk<T, kChunk> x;
    float mean, rstd;  // of the row
  };
  struct Column {
    float gamma[kChunk], beta[kLayer ? kChunk : 1];
  };

  const T* x;
  Param gamma, beta;
  float gamma_offset;  // 1 if gamma is zero-centred
  float* mean;         // [rows], written by NormStatsKernel
  float* rstd;         // [rows], written by NormStatsKernel
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const {
    fragment.x.Load(x + row * cols + col);
    if constexpr (kLayer) fragment.mean = mean[row];
    fragment.rstd = rstd[row];
  }
  __device__ void LoadColumn(int64_t col, Column& column) const {
    gamma.Load(col, column.gamma);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) column.gamma[i] += gamma_offset;
    if constexpr (kLayer) beta.Load(col, column.beta);
  }
  __device__ void Compute(int64_t, const Fragment& fragment, const Column& column, float (&y)[1][kChunk]) const {
    Unpack(fragment.x, y[0]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if constexpr (kLayer) {
        y[0][i] = (y[0][i] - fragment.mean) * fragment.rstd * column.gamma[i] + column.beta[i];
      } else {
        y[0][i] = y[0][i] * fragment.rstd * column.gamma[i];
      }
    }
    Round<T>(y[0]);
  }
};

// mean[row] and rstd[row], a warp for each row. The row is read from device memory once: the second and third look at
// it hit the caches. Also does the work of AmaxKernel (quantizing_pass.cuh).
template <class T, bool kLayer>
__global__ void __launch_bounds__(kThreads)
    NormStatsKernel(NormLoader<T, kLayer> loader, int64_t rows, float epsilon, AmaxNeed need, const float* scale,
                    bool only_amax, uint32_t* partials, float* amax_to_zero) {
  __shared__ uint32_t scratch[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t cols = loader.cols;
  const bool take_amax = need == AmaxNeed::kAlways || (need == AmaxNeed::kIfUnseeded && *scale == 0.0f);
  if (amax_to_zero != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *amax_to_zero = 0.0f;
  if (only_amax && !take_amax) return;

  // f(col, x) for every chunk of the row that belongs to this lane.
  const auto for_each_chunk = [&](int64_t row, auto&& f) {
#pragma unroll 8
    for (int64_t col = lane * kChunk; col < cols; col += kWarp * kChunk) {
      Chunk<T, kChunk> x;
      x.Load(loader.x + row * cols + col);
      f(col, x);
    }
  };
  const auto sum_of_squares = [&](int64_t row, float center) {
    float sum = 0.0f;
    for_each_chunk(row, [&](int64_t, const auto& chunk) {
      float x[kChunk];
      Unpack(chunk, x);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum += (x[i] - center) * (x[i] - center);
    });
    return WarpSum(sum);
  };

  float amax = 0.0f;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    float mean = 0.0f;
    if constexpr (kLayer) {
      for_each_chunk(row, [&](int64_t, const auto& chunk) {
        float x[kChunk];
        Unpack(chunk, x);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) mean += x[i];
      });
      mean = WarpSum(mean) / static_cast<float>(cols);
    }
    const float rstd = 1.0f / sqrtf(sum_of_squares(row, mean) / static_cast<float>(cols) + epsilon);
    if (lane == 0) {
      if constexpr (kLayer) loader.mean[row] = mean;
      loader.rstd[row] = rstd;
    }
    if (!take_amax) continue;
    for_each_chunk(row, [&](int64_t col, const auto& chunk) {
      typename NormLoader<T, kLayer>::Column column;
      loader.LoadColumn(col, column);
      float y[1][kChunk];
      loader.Compute(row, {chunk, mean, rstd}, column, y);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) amax = MaxMagnitude(amax, y[0][i]);
    });
  }
  if (!take_amax) return;
  const uint32_t bits = BlockMax<kThreads>(__float_as_uint(amax), scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = bits;
}

template <class T, bool kLayer>
cudaError_t LaunchTyped(const NormArgs& args, void* memory, cudaStream_t stream) {
  PassWorkspace workspace(args.rows, args.cols, args.out, memory);
  workspace.num_partials = static_cast<int>(std::min<int64_t>((args.rows + kWarps - 1) / kWarps, kMaxPartials));
  const NormLoader<T, kLayer> loader{static_cast<const T*>(args.x),
                                     {args.gamma, args.param_dtype},
                                     {args.beta, args.param_dtype},
                                     args.zero_centered_gamma ? 1.0f : 0.0f,
                                     args.mean != nullptr ? args.mean : workspace.mean,
                                     args.rstd != nullptr ? args.rstd : workspace.rstd,
                                     args.cols};
  const bool only_amax = !WritesTiles(args.out) && args.mean == nullptr && args.rstd == nullptr;
  NormStatsKernel<<<workspace.num_partials, kThreads, 0, stream>>>(loader, args.rows, args.epsilon,
                                                                   NeedOfAmax(args.out), args.out.scale, only_amax,
                                                                   workspace.partials, args.out.amax);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return LaunchWrite(loader, args.rows, args.cols, args.out, workspace, stream);
}

}  // namespace

size_t NormWorkspaceBytes(const NormArgs& args) {
  return PassWorkspace::Bytes(args.rows, args.cols, args.out, /*norm=*/true);
}

cudaError_t LaunchNorm(const NormArgs& args, void* workspace, cudaStream_t stream) {
  return DispatchFloat(args.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return args.kind == NormKind::kLayerNorm ? LaunchTyped<T, true>(args, workspace, stream)
                                             : LaunchTyped<T, false>(args, workspace, stream);
  });
}

}  // namespace te_jax::kernels
