#include "csrc/gemm/bench.h"

#include <limits>

#include "csrc/core/dtype.h"
#include "csrc/core/fp8.h"
#include "csrc/gemm/algorithm_table.h"
#include "csrc/gemm/gemm.h"
#include "csrc/kernels/random.h"

namespace te_jax::gemm {
namespace {

constexpr size_t kFlushBytes = size_t{128} << 20;  // more than twice the L2 cache of an H200
constexpr size_t kReserve = size_t{256} << 20;     // left to others: modules and graphs that are loaded meanwhile
constexpr size_t kAlignment = 256;
constexpr float kNever = std::numeric_limits<float>::infinity();

// Of an operand [rows, k], with the padding that cuBLASLt wants for 128x128 blocks.
size_t ScaleBytes(Scaling scaling, int64_t rows, int64_t k) {
  const int64_t blocks = NumBlocks(k);
  switch (scaling) {
    case Scaling::kTensor: return sizeof(float);
    case Scaling::kBlock1x128: return static_cast<size_t>(blocks * rows) * sizeof(float);
    case Scaling::kBlock128x128: return static_cast<size_t>(NumBlocks(rows) * ((blocks + 3) / 4 * 4)) * sizeof(float);
  }
  return sizeof(float);
}

std::string MiB(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

Bench::Bench(const GemmDesc& desc, const GemmArgs& args) : args_(args) {
  Place(desc);
  if (!Allocate(used_)) return;
  used_ = 0;
  Place(desc);
  Fill(desc);
}

Bench::~Bench() {
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  (void)cudaGetLastError();
}

// In a pool of its own: it is for others to say whether the device's default pool gives back what is freed. cudaFree
// would wait for everything on the device, which a collective there may keep busy until this thread has gone on.
bool Bench::Allocate(size_t bytes) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  size_t free = 0, total = 0;
  if (!Ok(cudaGetDevice(&properties.location.id)) || !Ok(cudaMemGetInfo(&free, &total))) return false;
  if (free < bytes + kReserve) {
    error_ = "timing takes " + MiB(bytes) + " and leaves " + MiB(kReserve) + "; there are " + MiB(free);
    return false;
  }
  return Ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)) && Ok(cudaMemPoolCreate(&pool_, &properties)) &&
         Ok(cudaMallocFromPoolAsync(&memory_, bytes, pool_, stream_));
}

std::vector<float> Bench::Times(const std::vector<size_t>& which, int rounds, const Launch& launch) {
  std::vector<std::vector<float>> times(which.size());
  std::vector<bool> good(which.size(), true);
  while (events_.size() < 2 * which.size() && error_.empty()) {
    cudaEvent_t event = nullptr;
    if (Ok(cudaEventCreate(&event))) events_.push_back(event);
  }
  for (int round = 0; round < rounds && error_.empty(); ++round) {
    for (size_t i = 0; i < which.size(); ++i) {
      if (!good[i]) continue;
      Ok(cudaMemsetAsync(flush_, 0, kFlushBytes, stream_));
      Ok(cudaEventRecord(events_[2 * i], stream_));
      good[i] = launch(which[i], workspace_, stream_);
      Ok(cudaEventRecord(events_[2 * i + 1], stream_));
    }
    if (!Ok(cudaStreamSynchronize(stream_))) break;
    for (size_t i = 0; i < which.size(); ++i) {
      float ms = 0.0f;
      if (good[i] && Ok(cudaEventElapsedTime(&ms, events_[2 * i], events_[2 * i + 1]))) times[i].push_back(1e3f * ms);
    }
  }
  std::vector<float> medians(which.size(), kNever);
  for (size_t i = 0; i < which.size(); ++i) {
    if (good[i] && error_.empty()) medians[i] = Median(times[i]);
  }
  return medians;
}

bool Bench::Ok(cudaError_t error) {
  if (error != cudaSuccess) {
    if (error_.empty()) error_ = cudaGetErrorString(error);
    (void)cudaGetLastError();
  }
  return error == cudaSuccess;
}

template <class T>
void Bench::Take(T*& pointer, size_t bytes) {
  pointer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<char*>(memory_) + used_);
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Gives every pointer of args_ a place; without memory, counts the bytes.
void Bench::Place(const GemmDesc& desc) {
  const auto m = static_cast<size_t>(desc.m), n = static_cast<size_t>(desc.n), k = static_cast<size_t>(desc.k);
  Take(args_.lhs, m * k * SizeOf(desc.lhs));
  Take(args_.rhs, n * k * SizeOf(desc.rhs));
  Take(args_.out, m * n * SizeOf(desc.out));
  if (desc.accumulates && !desc.in_place) Take(args_.c, m * n * SizeOf(desc.c));
  if (desc.in_place) args_.c = args_.out;
  if (desc.has_bias) Take(args_.bias, n * SizeOf(desc.bias_dtype));
  if (IsFP8(desc.lhs)) Take(args_.lhs_scale_inv, ScaleBytes(desc.lhs_scaling, desc.m, desc.k));
  if (IsFP8(desc.lhs)) Take(args_.rhs_scale_inv, ScaleBytes(desc.rhs_scaling, desc.n, desc.k));
  if (IsFP8(desc.out)) Take(args_.out_scale, sizeof(float));
  if (desc.has_amax) Take(args_.amax, sizeof(float));
  Take(workspace_, kWorkspaceBytes);
  Take(flush_, kFlushBytes);
}

void Bench::Fill(const GemmDesc& desc) {
  const auto random = [&](const void* values, DType dtype, int64_t size, uint32_t seed) {
    if (values != nullptr) Ok(kernels::LaunchRandom(const_cast<void*>(values), dtype, size, seed, stream_));
  };
  random(args_.lhs, desc.lhs, desc.m * desc.k, 1);
  random(args_.rhs, desc.rhs, desc.n * desc.k, 2);
  random(args_.out, desc.out, desc.m * desc.n, 3);
  if (desc.accumulates && !desc.in_place) random(args_.c, desc.c, desc.m * desc.n, 4);
  if (desc.has_bias) random(args_.bias, desc.bias_dtype, desc.n, 5);
  // 0x3a3a3a3a is 0.0007: products of FP8 operands come out near 1.
  const auto scale = [&](const float* scales, size_t bytes) {
    if (scales != nullptr) Ok(cudaMemsetAsync(const_cast<float*>(scales), 0x3a, bytes, stream_));
  };
  scale(args_.lhs_scale_inv, ScaleBytes(desc.lhs_scaling, desc.m, desc.k));
  scale(args_.rhs_scale_inv, ScaleBytes(desc.rhs_scaling, desc.n, desc.k));
  scale(args_.out_scale, sizeof(float));
  if (args_.amax != nullptr) Ok(cudaMemsetAsync(args_.amax, 0, sizeof(float), stream_));
}

}  // namespace te_jax::gemm
