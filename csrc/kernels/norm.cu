#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/norm.h"
#include "csrc/kernels/norm_schedule.h"
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
  };
  struct Column {
    float gamma[kChunk], beta[kLayer ? kChunk : 1];
  };

  const T* x;
  Param gamma, beta;
  float gamma_offset;  // 1 if gamma is zero-centred
  float* mean;         // [rows], written by NormRows
  float* rstd;         // [rows], written by NormRows
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const { fragment.x.Load(x + row * cols + col); }
  __device__ void LoadColumn(int64_t col, Column& column) const {
    gamma.Load(col, column.gamma);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) column.gamma[i] += gamma_offset;
    if constexpr (kLayer) beta.Load(col, column.beta);
  }
  __device__ void Compute(int64_t row, const Fragment& fragment, const Column& column, float (&y)[1][kChunk]) const {
    Normalize(fragment.x, kLayer ? mean[row] : 0.0f, rstd[row], column, y[0]);
  }
  __device__ static void Normalize(const Chunk<T, kChunk>& x, float mean, float rstd, const Column& column,
                                   float (&y)[kChunk]) {
    Unpack(x, y);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if constexpr (kLayer) {
        y[i] = (y[i] - mean) * rstd * column.gamma[i] + column.beta[i];
      } else {
        y[i] = y[i] * rstd * column.gamma[i];
      }
    }
    Round<T>(y);
  }
};

// Chunks of a row that a thread keeps in registers (32 of them): the second and the third look at the row are free.
template <class T>
constexpr int kHeldChunks = 16 / static_cast<int>(sizeof(T));

// What row tasks count up, from the 0 of ResetKernel.
struct Counters {
  uint32_t* taken;      // tasks
  uint32_t* done;       // [strips]: row tasks of each; all in the first one where the scale comes from the amax
  uint32_t* amax_bits;  // the maximum
};

struct RowMemory {
  float sums[kWarps];
  uint32_t maxima[kWarps];
};

// Row task `task`: mean[row] and rstd[row] of kThreads >> log2_row_threads rows; and their part of the amax, unless
// amax_bits is null.
template <class T, bool kLayer>
__device__ inline void NormRows(const NormLoader<T, kLayer>& loader, const NormSchedule& schedule, uint32_t task,
                                int64_t rows, float epsilon, uint32_t* amax_bits, RowMemory& memory) {
  constexpr int kHeld = kHeldChunks<T>;
  const int row_threads = 1 << schedule.log2_row_threads, lane = threadIdx.x & (row_threads - 1);
  const int64_t row =
      static_cast<int64_t>(task) * (kThreads >> schedule.log2_row_threads) + (threadIdx.x >> schedule.log2_row_threads);
  const int cols = row < rows ? static_cast<int>(loader.cols) : 0;  // rows past the end are empty
  const int first = lane * kChunk, step = row_threads * kChunk;       // of the thread's columns
  const T* const x = loader.x + row * loader.cols + first;

  Chunk<T, kChunk> held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < cols) held[i].Load(x + i * step);
  }
  // f(col, x) for every chunk of the row that belongs to this thread.
  const auto for_each_chunk = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * step < cols) f(first + i * step, held[i]);
    }
#pragma unroll 1
    for (int offset = kHeld * step; first + offset < cols; offset += step) {
      Chunk<T, kChunk> chunk;
      chunk.Load(x + offset);
      f(first + offset, chunk);
    }
  };
  const auto row_sum = [&](float value) {
    value = WarpSum(value);
    const int row_warps = row_threads / kWarp, warp = threadIdx.x / kWarp;
    if (row_warps == 1) return value;
    if (threadIdx.x % kWarp == 0) memory.sums[warp] = value;
    __syncthreads();
    value = 0.0f;
    for (int i = 0; i < row_warps; ++i) value += memory.sums[(warp & -row_warps) + i];
    __syncthreads();  // sums may be written again
    return value;
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
  if (lane == 0 && row < rows) {
    if constexpr (kLayer) loader.mean[row] = mean;
    loader.rstd[row] = rstd;
  }
  if (amax_bits == nullptr) return;

  float amax = 0.0f;
  for_each_chunk([&](int col, const auto& chunk) {
    typename NormLoader<T, kLayer>::Column column;
    loader.LoadColumn(col, column);
    float y[kChunk];
    loader.Normalize(chunk, mean, rstd, column, y);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) amax = MaxMagnitude(amax, y[i]);
  });
  const uint32_t bits = BlockMax<kThreads>(__float_as_uint(amax), memory.maxima);
  if (threadIdx.x == 0) atomicMax(amax_bits, bits);
}

__global__ void __launch_bounds__(kThreads) ResetKernel(Counters counters, int64_t strips, float* amax) {
  AwaitPredecessor();
  for (int64_t i = threadIdx.x; i < strips; i += kThreads) counters.done[i] = 0;
  if (threadIdx.x != 0) return;
  *counters.taken = 0;
  *counters.amax_bits = 0;
  if (amax != nullptr) *amax = 0.0f;
}

// Where nothing is written but statistics or amax. only_if_zero: null, or the scale: nothing is done unless it is 0.
template <class T, bool kLayer>
__global__ void __launch_bounds__(kThreads, 4)
    NormRowsKernel(NormLoader<T, kLayer> loader, NormSchedule schedule, int64_t rows, float epsilon,
                   const float* only_if_zero, uint32_t* amax_bits) {
  __shared__ RowMemory memory;
  AwaitPredecessor();
  if (only_if_zero != nullptr && *only_if_zero != 0.0f) return;
  NormRows(loader, schedule, blockIdx.x, rows, epsilon, amax_bits, memory);
}

__device__ inline uint32_t LoadAcquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// A block does one task. It waits for tasks of lower numbers only, which were taken by blocks that run or are done.
template <class T, bool kLayer, bool kDbias>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    NormKernel(NormLoader<T, kLayer> loader, NormSchedule schedule, float epsilon, Counters counters,
               PassParams params) {
  using Loader = NormLoader<T, kLayer>;
  __shared__ TileMemory<Loader> tile_memory;
  __shared__ RowMemory row_memory;
  __shared__ float mean[kLayer ? kTileRows : 1], rstd[kTileRows];
  __shared__ uint32_t ticket;
  AwaitPredecessor();
  if (threadIdx.x == 0) ticket = atomicAdd(counters.taken, 1u);
  // Without a scale nothing is written before the statistics, and with them the amax, of all rows are there.
  const bool unseeded = params.quantizes && *params.scale == 0.0f;
  __syncthreads();
  const NormTask task = TaskOf(ticket, schedule, unseeded ? schedule.strips : schedule.lead);

  if (!task.writes) {
    NormRows(loader, schedule, task.index, params.rows, epsilon, unseeded ? counters.amax_bits : nullptr, row_memory);
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    atomicAdd(counters.done + (unseeded ? 0 : task.index / schedule.row_tasks), 1u);
    return;
  }

  // Unseeded from the end: what was read last is still in the L2 cache.
  const uint32_t index = unseeded ? schedule.strips * schedule.tiles - 1 - task.index : task.index;
  const Place at(index, params.cols);
  const Operands<Loader> operands(loader, at, params.rows, params.cols);
  if (threadIdx.x < kTileRows) {
    const uint32_t* done = counters.done + (unseeded ? 0 : index / schedule.tiles);
    const uint32_t wanted = unseeded ? schedule.strips * schedule.row_tasks : schedule.row_tasks;
    while (LoadAcquire(done) != wanted) __nanosleep(20);
    const int64_t row = at.tile_row + threadIdx.x;
    if (row < params.rows) {
      if constexpr (kLayer) mean[threadIdx.x] = __ldcg(loader.mean + row);
      rstd[threadIdx.x] = __ldcg(loader.rstd + row);
    }
  }
  __syncthreads();
  loader.mean = mean - at.tile_row;
  loader.rstd = rstd - at.tile_row;
  WriteTile<Loader, kDbias>(loader, params, at, operands, index == 0, tile_memory);
}

template <class T, bool kLayer>
cudaError_t LaunchTyped(const NormArgs& args, void* memory, cudaStream_t stream) {
  PassWorkspace workspace(args.rows, args.cols, args.out, memory);
  workspace.num_partials = 1;
  const NormLoader<T, kLayer> loader{static_cast<const T*>(args.x),
                                     {args.gamma, args.param_dtype},
                                     {args.beta, args.param_dtype},
                                     args.zero_centered_gamma ? 1.0f : 0.0f,
                                     args.mean != nullptr ? args.mean : workspace.mean,
                                     args.rstd != nullptr ? args.rstd : workspace.rstd,
                                     args.cols};
  const NormSchedule schedule = MakeSchedule(args.rows, args.cols, kHeldChunks<T> * kChunk, kThreads);
  const Counters counters{workspace.counters, workspace.counters + 1, workspace.partials};
  cudaError_t error = Launch(ResetKernel, 1, kThreads, stream, counters, NumRowTiles(args.rows), args.out.amax);
  if (error != cudaSuccess) return error;

  if (!WritesTiles(args.out)) {
    const bool stats = args.mean != nullptr || args.rstd != nullptr;
    const AmaxNeed need = NeedOfAmax(args.out);
    error = Launch(NormRowsKernel<T, kLayer>, schedule.strips * schedule.row_tasks, kThreads, stream, loader, schedule,
                   args.rows, args.epsilon, !stats && need == AmaxNeed::kIfUnseeded ? args.out.scale : nullptr,
                   need == AmaxNeed::kNone ? nullptr : counters.amax_bits);
    return error != cudaSuccess ? error : LaunchFinishAmax(args.out, workspace, stream);
  }

  const uint32_t tasks = schedule.strips * (schedule.row_tasks + schedule.tiles);
  const PassParams params = MakePassParams(args.rows, args.cols, args.out, workspace);
  if (args.out.dbias == nullptr) {
    return Launch(NormKernel<T, kLayer, false>, tasks, kThreads, stream, loader, schedule, args.epsilon, counters,
                  params);
  }
  error = Launch(NormKernel<T, kLayer, true>, tasks, kThreads, stream, loader, schedule, args.epsilon, counters,
                 params);
  if (error != cudaSuccess) return error;
  return LaunchDbias(NumRowTiles(args.rows), args.cols, workspace.tile_sums, args.out, stream);
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
