#include "csrc/kernels/block_pass.cuh"
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

// Chunks of a row that a thread loads before it uses the first one, and keeps: further looks at the row are free. With
// as many blocks as fit, 96 to 128 KiB of a multiprocessor are on their way.
template <class T>
constexpr int kHeldChunks = 16 / static_cast<int>(sizeof(T));
constexpr int kWarpCols = kWarp * kChunk;
template <class T>
constexpr int kSegmentCols = kHeldChunks<T> * kWarpCols;  // of a row, which a warp holds

// Of the warps that share a row: as many as hold it, if a block has so many.
template <class T>
int Log2RowWarps(int64_t cols) {
  int log2 = 0;
  while ((1 << log2) < kWarps && (int64_t{kSegmentCols<T>} << log2) < cols) ++log2;
  return log2;
}

// mean[row] and rstd[row]; and the work of AmaxKernel (quantizing_pass.cuh), as `need` says, on y. A block takes
// kWarps >> log2_row_warps rows. Where the amax is taken, only the first num_partials blocks work, and take the others'
// rows too. only_amax: the statistics aren't wanted for themselves.
template <class T, bool kLayer>
__global__ void __launch_bounds__(kThreads, kLayer ? 3 : 4)
    NormStatsKernel(NormLoader<T, kLayer> loader, int64_t rows, int log2_row_warps, float epsilon, AmaxNeed need,
                    bool only_amax, const float* scale, uint32_t* partials, unsigned num_partials,
                    float* amax_to_zero) {
  constexpr int kHeld = kHeldChunks<T>;
  __shared__ float sums[kWarps];
  __shared__ uint32_t scratch[kWarps];
  AwaitPredecessor();
  if (amax_to_zero != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *amax_to_zero = 0.0f;
  // Asked after the rows, where possible, so that they needn't wait for the scale.
  const auto takes_amax = [&] {
    return need == AmaxNeed::kAlways || (need == AmaxNeed::kIfUnseeded && __ldcg(scale) == 0.0f);
  };
  if (only_amax && !takes_amax()) return;
  if (blockIdx.x >= num_partials && takes_amax()) return;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int row_warps = 1 << log2_row_warps, warp_of_row = warp & (row_warps - 1);
  const int row_of_block = warp >> log2_row_warps, block_rows = kWarps >> log2_row_warps;
  // The thread's columns, of those that are held and of those that aren't.
  const int first = warp_of_row * kSegmentCols<T> + lane * kChunk;
  const int tail = row_warps * kSegmentCols<T> + warp_of_row * kWarpCols + lane * kChunk;
  const auto row_sum = [&](float value) {
    value = WarpSum(value);
    if (row_warps == 1) return value;
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    value = 0.0f;
    for (int i = 0; i < row_warps; ++i) value += sums[warp - warp_of_row + i];
    __syncthreads();  // sums may be written again
    return value;
  };

  float amax = 0.0f;
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * block_rows; block_row < rows;
       block_row += static_cast<int64_t>(num_partials) * block_rows) {
    const int64_t row = block_row + row_of_block;
    const int cols = row < rows ? static_cast<int>(loader.cols) : 0;  // rows past the end are empty
    const T* const x = loader.x + row * loader.cols;
    Chunk<T, kChunk> held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * kWarpCols < cols) held[i].Load(x + first + i * kWarpCols);
    }
    const bool amax_too = takes_amax();
    // f(col, x) for every chunk of the row that belongs to this thread.
    const auto for_each_chunk = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kWarpCols < cols) f(first + i * kWarpCols, held[i]);
      }
#pragma unroll 1
      for (int col = tail; col < cols; col += row_warps * kWarpCols) {
        Chunk<T, kChunk> chunk;
        chunk.Load(x + col);
        f(col, chunk);
      }
    };

    float mean = 0.0f;
    if constexpr (kLayer) {
      for_each_chunk([&](int, const auto& chunk) {
        float values[kChunk];
        Unpack(chunk, values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) mean += values[i];
      });
      mean = row_sum(mean) / static_cast<float>(loader.cols);
    }
    float squares = 0.0f;
    for_each_chunk([&](int, const auto& chunk) {
      float values[kChunk];
      Unpack(chunk, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) squares += (values[i] - mean) * (values[i] - mean);
    });
    const float rstd = 1.0f / sqrtf(row_sum(squares) / static_cast<float>(loader.cols) + epsilon);
    if (warp_of_row == 0 && lane == 0 && row < rows) {
      if constexpr (kLayer) loader.mean[row] = mean;
      loader.rstd[row] = rstd;
    }
    if (!amax_too) return;

    for_each_chunk([&](int col, const auto& chunk) {
      typename NormLoader<T, kLayer>::Column column;
      loader.LoadColumn(col, column);
      float y[1][kChunk];
      loader.Compute(row, {chunk, mean, rstd}, column, y);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) amax = MaxMagnitude(amax, y[0][i]);
    });
  }
  const uint32_t bits = BlockMax<kThreads>(__float_as_uint(amax), scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = bits;
}

// Queues NormStatsKernel, after which `loader` can be read, and sets workspace.num_partials.
template <class T, bool kLayer>
cudaError_t LaunchNormStats(const NormLoader<T, kLayer>& loader, const NormArgs& args, PassWorkspace& workspace,
                            cudaStream_t stream) {
  const int log2_row_warps = Log2RowWarps<T>(args.cols), block_rows = kWarps >> log2_row_warps;
  const int64_t blocks = (args.rows + block_rows - 1) / block_rows;
  workspace.num_partials = static_cast<int>(std::min<int64_t>(blocks, kMaxPartials));
  const bool only_amax = !WritesTiles(args.out) && args.mean == nullptr && args.rstd == nullptr;
  return Launch(NormStatsKernel<T, kLayer>, static_cast<unsigned>(blocks), kThreads, stream, loader, args.rows,
                log2_row_warps, args.epsilon, NeedOfAmax(args.out), only_amax, args.out.scale, workspace.partials,
                static_cast<unsigned>(workspace.num_partials), args.out.amax);
}

template <class T, bool kLayer>
cudaError_t LaunchTyped(const NormArgs& args, void* memory, cudaStream_t stream) {
  PassWorkspace workspace(args.rows, args.cols, args.out, memory);
  const NormLoader<T, kLayer> loader{static_cast<const T*>(args.x),
                                     {args.gamma, args.param_dtype},
                                     {args.beta, args.param_dtype},
                                     args.zero_centered_gamma ? 1.0f : 0.0f,
                                     args.mean != nullptr ? args.mean : workspace.mean,
                                     args.rstd != nullptr ? args.rstd : workspace.rstd,
                                     args.cols};
  const cudaError_t error = LaunchNormStats(loader, args, workspace, stream);
  return error != cudaSuccess ? error : LaunchWrite(loader, args.rows, args.cols, args.out, workspace, stream);
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
