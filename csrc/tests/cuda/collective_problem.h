// Collective matmuls of threads that each have a GPU (or share one): operands, a float32 reference, the schedules. For
// the test and the bench.
#ifndef TE_JAX_TESTS_CUDA_COLLECTIVE_PROBLEM_H_
#define TE_JAX_TESTS_CUDA_COLLECTIVE_PROBLEM_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/comm/cuda/device_group.h"
#include "csrc/comm/cuda/run.h"
#include "csrc/gemm/gemm.h"
#include "csrc/kernels/random.h"

namespace te_jax::comm {

#define CUDA_OK(call)                                                                              \
  do {                                                                                             \
    if (const cudaError_t error = (call); error != cudaSuccess) {                                  \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error));          \
      std::_Exit(2);                                                                               \
    }                                                                                              \
  } while (false)

inline void Require(const gemm::Status& status) {
  if (status.code == gemm::Status::kOk) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::_Exit(2);
}

struct Shape {
  bool scatter;
  int64_t m, k, n;
};

// Memory of one rank's call. Everything lives until the process ends.
struct Operands {
  GemmArgs gemm;
  void* kept = nullptr;
  float* kept_scale_inv = nullptr;
};

template <class T = void>
T* Allocate(size_t bytes) {
  void* memory = nullptr;
  CUDA_OK(cudaMalloc(&memory, bytes));
  return static_cast<T*>(memory);
}

inline Operands MakeOperands(const Shape& shape, int ranks, int rank) {
  Operands made;
  GemmArgs& gemm = made.gemm;
  gemm.m = shape.scatter ? shape.m : shape.m / ranks;
  gemm.k = shape.scatter ? shape.k / ranks : shape.k;
  gemm.n = shape.scatter ? shape.n : shape.n / ranks;
  gemm.fast_accumulation = true;
  const auto seed = static_cast<uint32_t>(rank);
  void *lhs = Allocate(gemm.m * gemm.k), *rhs = Allocate(gemm.n * gemm.k), *bias = Allocate(gemm.n * 2);
  CUDA_OK(kernels::LaunchRandom(lhs, DType::kE4M3, gemm.m * gemm.k, 1 + seed, nullptr));
  CUDA_OK(kernels::LaunchRandom(rhs, DType::kE4M3, gemm.n * gemm.k, 101 + seed, nullptr));
  // The same bias on every rank of a reduce-scatter.
  CUDA_OK(kernels::LaunchRandom(bias, DType::kBF16, gemm.n, shape.scatter ? 201 : 201 + seed, nullptr));
  const float scales[2] = {1.0f / (128 << rank), 1.0f / 512};  // of x: another one on every rank
  auto* device_scales = Allocate<float>(512);  // cuBLASLt takes a scale whose address is a multiple of 16 only
  CUDA_OK(cudaMemcpy(device_scales, scales, sizeof(float), cudaMemcpyHostToDevice));
  CUDA_OK(cudaMemcpy(device_scales + 64, scales + 1, sizeof(float), cudaMemcpyHostToDevice));
  gemm.lhs = lhs;
  gemm.rhs = rhs;
  gemm.lhs_scale_inv = device_scales;
  gemm.rhs_scale_inv = device_scales + 64;
  gemm.bias = bias;
  gemm.out = Allocate(static_cast<size_t>(shape.scatter ? shape.m / ranks : shape.m) * gemm.n * 2);
  made.kept = Allocate(static_cast<size_t>(shape.m) * gemm.k);
  made.kept_scale_inv = Allocate<float>(static_cast<size_t>(ranks) * sizeof(float));
  CUDA_OK(cudaDeviceSynchronize());
  return made;
}

inline float FromBF16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// rows x n of the product of `lhs` (on this device) and the rank's rhs in float32, without bias.
inline std::vector<float> Product(const Operands& operands, const void* lhs, const float* scale, int64_t rows,
                                  void* workspace) {
  GemmArgs args = operands.gemm;
  args.m = rows;
  args.lhs = lhs;
  args.lhs_scale_inv = scale;
  args.bias = nullptr;
  args.fast_accumulation = false;
  args.out_dtype = args.c_dtype = DType::kF32;
  const size_t bytes = static_cast<size_t>(rows * args.n) * 4;
  void* out = Allocate(bytes);
  args.out = out;
  Require(gemm::Launch(args, workspace, nullptr));
  std::vector<float> host(bytes / 4);
  CUDA_OK(cudaMemcpy(host.data(), out, bytes, cudaMemcpyDeviceToHost));
  CUDA_OK(cudaFree(out));
  return host;
}

template <class T>
std::vector<T> ToHost(const void* device, size_t count) {
  std::vector<T> host(count);
  CUDA_OK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

struct Error {
  double frobenius = 0, max = 0;
};

// The result of every rank against sums of float32 products. Slow: all rows.
inline Error Compare(const Shape& shape, const std::vector<Operands>& all, DeviceGroup& group) {
  const int ranks = group.ranks();
  double difference = 0, norm = 0, worst = 0;
  const auto add = [&](float got, double want) {
    const double d = got - want;
    difference += std::isfinite(got) ? d * d : 1e30;
    norm += want * want;
    worst = std::max(worst, std::isfinite(got) ? std::abs(d) : 1e30);
  };
  const int64_t block = shape.m / ranks, n = all[0].gemm.n;
  std::vector<std::vector<float>> partial(ranks);
  if (shape.scatter) {
    for (int r = 0; r < ranks; ++r) {
      CUDA_OK(cudaSetDevice(group.rank(r).device()));
      partial[r] = Product(all[r], all[r].gemm.lhs, all[r].gemm.lhs_scale_inv, shape.m, group.rank(r).workspace());
    }
  }
  for (int r = 0; r < ranks; ++r) {
    CUDA_OK(cudaSetDevice(group.rank(r).device()));
    const auto bias = ToHost<uint16_t>(all[r].gemm.bias, n);
    const int64_t rows = shape.scatter ? block : shape.m;
    const auto got = ToHost<uint16_t>(all[r].gemm.out, rows * n);
    std::vector<float> gathered;
    for (int source = 0; !shape.scatter && source < ranks; ++source) {
      void* copy = Allocate(block * all[r].gemm.k);
      auto* scale = Allocate<float>(4);
      CUDA_OK(cudaMemcpy(copy, all[source].gemm.lhs, block * all[r].gemm.k, cudaMemcpyDefault));
      CUDA_OK(cudaMemcpy(scale, all[source].gemm.lhs_scale_inv, 4, cudaMemcpyDefault));
      const auto product = Product(all[r], copy, scale, block, group.rank(r).workspace());
      gathered.insert(gathered.end(), product.begin(), product.end());
      CUDA_OK(cudaFree(copy));
      CUDA_OK(cudaFree(scale));
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < n; ++col) {
        double want = FromBF16(bias[col]);
        if (shape.scatter) {
          for (int s = 0; s < ranks; ++s) want += partial[s][(r * block + row) * n + col];
        } else {
          want += gathered[row * n + col];
        }
        add(FromBF16(got[row * n + col]), want);
      }
    }
  }
  return {std::sqrt(difference / norm), worst};
}

struct Schedule {
  int chunks;
  bool direct, keep;
  std::string name() const {
    return (direct ? "direct" : "copy") + std::string(" S") + std::to_string(chunks) + (keep ? " keep" : "");
  }
};

inline std::vector<Schedule> SchedulesOf(bool scatter) {
  if (!scatter) return {{1, false, false}, {2, false, false}, {1, false, true}};
  std::vector<Schedule> schedules;
  for (const int chunks : {1, 2, 4, 8}) schedules.push_back({chunks, false, false});
  for (const int chunks : {1, 2}) schedules.push_back({chunks, true, false});
  return schedules;
}

inline CollectiveGemm CallOf(const Shape& shape, const Schedule& schedule, int ranks, const Operands& operands) {
  CollectiveGemm call;
  call.problem.collective = shape.scatter ? Collective::kMatmulReduceScatter : Collective::kAllGatherMatmul;
  call.problem.ranks = ranks;
  call.problem.block_rows = shape.m / ranks;
  call.problem.chunks = schedule.chunks;
  call.problem.direct = schedule.direct;
  call.problem.keep = schedule.keep;
  call.gemm = operands.gemm;
  call.kept = operands.kept;
  call.kept_scale_inv = operands.kept_scale_inv;
  call.timeout_ns = 5'000'000'000;
  return call;
}

// Runs `body(rank, stream)` on a thread per rank.
inline void OnAllRanks(DeviceGroup& group, const std::function<void(int, cudaStream_t)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < group.ranks(); ++r) {
    threads.emplace_back([&, r] {
      CUDA_OK(cudaSetDevice(group.rank(r).device()));
      cudaStream_t stream = nullptr;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      body(r, stream);
      CUDA_OK(cudaStreamSynchronize(stream));
      CUDA_OK(cudaStreamDestroy(stream));
    });
  }
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < group.ranks(); ++r) {
    const auto* record = group.rank(r).record();
    if (record->failed == 0) continue;
    std::fprintf(stderr, "rank %d waited in vain for chunk %d of rank %d, call %u, seen %u\n", r, record->chunk,
                 record->source, record->epoch, record->seen);
    std::_Exit(3);
  }
}

inline int NumDevices() {
  int devices = 0;
  CUDA_OK(cudaGetDeviceCount(&devices));
  return devices;
}

// More ranks than GPUs share them.
inline std::unique_ptr<DeviceGroup> MakeGroup(int ranks, size_t slot_bytes) {
  std::vector<int> all;
  for (int i = 0; i < ranks; ++i) all.push_back(i % NumDevices());
  auto made = DeviceGroup::Create(all, slot_bytes);
  if (auto* why = std::get_if<std::string>(&made)) {
    std::fprintf(stderr, "no group: %s\n", why->c_str());
    std::_Exit(2);
  }
  return std::move(std::get<std::unique_ptr<DeviceGroup>>(made));
}

inline void WarmUp(DeviceGroup& group, const std::vector<CollectiveGemm>& calls) {
  for (int r = 0; r < group.ranks(); ++r) {  // one after another: an algorithm is timed while the other GPU rests
    CUDA_OK(cudaSetDevice(group.rank(r).device()));
    Require(Warm(calls[r], group.rank(r), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
  }
}

}  // namespace te_jax::comm

#endif  // TE_JAX_TESTS_CUDA_COLLECTIVE_PROBLEM_H_
