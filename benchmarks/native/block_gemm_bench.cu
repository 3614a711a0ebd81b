// Checks the own block-scaled FP8 product against an fp64 one on the GPU and times it beside cuBLASLt's.
//
//   block_gemm_bench check                          every configuration, several shapes; exit status 1 if one is wrong
//   block_gemm_bench burst|sustained block|vector MxNxK... [names]   one JSON line a shape and configuration (all, or
//                                                   those of the comma list); K a multiple of 512, for cuBLASLt's
//                                                   scales
//
// What power leaves of the clock differs with what ran before: rates come with the clock they were measured at. Data
// are normal, quantized so that a block's maximum is near 448.
#include <cuda_fp8.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/native/cublaslt.cuh"
#include "benchmarks/native/measure.cuh"
#include "csrc/kernels/block_gemm.h"

namespace {

using namespace te_jax;
using namespace te_jax::kernels;

// ---- data ----
__global__ void FillFp8(uint8_t* data, int64_t size, uint64_t seed) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= size) return;
  data[i] = __nv_cvt_float_to_fp8(Normal(i, seed) * 150, __NV_SATFINITE, __NV_E4M3);
}
__global__ void FillScales(float* data, int64_t size, uint64_t seed, bool powers) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= size) return;
  const float exponent = Uniform(i, seed) * 6 - 10;
  data[i] = exp2f(powers ? floorf(exponent) : exponent);
}

// ---- the product in fp64: rows row0, row0 + step, ... ----
__device__ float FromFp8(uint8_t x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}
__global__ void Reference(GemmArgs p, int64_t step, int64_t rows, double* out) {
  const int64_t column = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t row = blockIdx.y * step;
  if (column >= p.n) return;
  const int64_t blocks = (p.k + 127) / 128;
  const auto* a = static_cast<const uint8_t*>(p.lhs) + row * p.k;
  const auto* b = static_cast<const uint8_t*>(p.rhs) + column * p.k;
  double sum = 0;
  for (int64_t kb = 0; kb < blocks; ++kb) {
    double part = 0;
    for (int64_t k = kb * 128; k < min(p.k, kb * 128 + 128); ++k) part += double{FromFp8(a[k])} * FromFp8(b[k]);
    const bool vector_b = p.rhs_scaling == Scaling::kBlock1x128;
    const float sb = p.rhs_scale_inv[vector_b ? kb * p.n + column : column / 128 * blocks + kb];
    sum += part * p.lhs_scale_inv[kb * p.m + row] * sb;
  }
  out[blockIdx.y * p.n + column] = sum;
}

bool IsF32(const GemmArgs& p) { return p.out_dtype == DType::kF32; }

struct Problem {
  GemmArgs args;
  std::vector<void*> owned;

  Problem(int64_t m, int64_t n, int64_t k, bool vector_b, bool out_f32, bool powers, uint64_t seed) {
    const int64_t blocks = NumBlocks(k);
    const auto fp8 = [&](int64_t size, uint64_t s) {
      auto* p = static_cast<uint8_t*>(Own(size));
      FillFp8<<<(size + 255) / 256, 256>>>(p, size, s);
      return p;
    };
    const auto scales = [&](int64_t size, uint64_t s) {
      auto* p = static_cast<float*>(Own(size * 4));
      FillScales<<<(size + 255) / 256, 256>>>(p, size, s, powers);
      return p;
    };
    args.m = m, args.n = n, args.k = k;
    args.lhs = fp8(m * k, 8 * seed);
    args.lhs_scaling = Scaling::kBlock1x128;
    args.lhs_scale_inv = scales(blocks * m, 8 * seed + 2);
    args.rhs = fp8(n * k, 8 * seed + 4);
    args.rhs_scaling = vector_b ? Scaling::kBlock1x128 : Scaling::kBlock128x128;
    args.rhs_scale_inv = scales(vector_b ? blocks * n : NumBlocks(n) * blocks, 8 * seed + 6);
    args.out_dtype = out_f32 ? DType::kF32 : DType::kBF16;
    args.out = Own(OutBytes(m, n, out_f32) + kGuard);
    CHECK_CUDA(cudaGetLastError());
  }
  ~Problem() {
    for (void* p : owned) cudaFree(p);
  }
  void* Own(size_t bytes) {
    void* p = nullptr;
    CHECK_CUDA(cudaMalloc(&p, bytes));
    owned.push_back(p);
    return p;
  }
  static constexpr size_t kGuard = 4096;
  static size_t OutBytes(int64_t m, int64_t n, bool f32) { return m * n * (f32 ? 4 : 2); }
};

// ---- own configurations ----
struct Variant {
  const char* name;
  bool vector_b;
  int tile_rows;
  cudaError_t Launch(const GemmArgs& args) const { return LaunchBlockGemm(args, tile_rows, nullptr); }
};
constexpr Variant kVariants[] = {{"256x128", false, 256}, {"v256x128", true, 256}, {"v192x128", true, 192}};

// ---- comparison ----
struct Errors {
  double l2, max;  // relative to the result's norm; the largest, relative to |element| + rms
  bool guard;      // nothing was written behind the result
};
float Element(const std::vector<char>& host, int64_t i, bool f32) {
  if (f32) return reinterpret_cast<const float*>(host.data())[i];
  const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(host.data())[i]} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
Errors Compare(const GemmArgs& p, const std::vector<double>& expected, int64_t step) {
  const size_t bytes = Problem::OutBytes(p.m, p.n, IsF32(p));
  std::vector<char> host(bytes + Problem::kGuard);
  CHECK_CUDA(cudaMemcpy(host.data(), p.out, host.size(), cudaMemcpyDeviceToHost));
  double error2 = 0, norm2 = 0, worst = 0;
  for (double x : expected) norm2 += x * x;
  const double rms = std::sqrt(norm2 / expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t row = i / p.n * step, column = i % p.n;
    const double error = std::abs(Element(host, row * p.n + column, IsF32(p)) - expected[i]);
    error2 += error * error;
    worst = std::isnan(error) ? 1e30 : std::max(worst, error / (std::abs(expected[i]) + rms));
  }
  bool guard = true;
  for (size_t i = bytes; i < host.size(); ++i) guard &= static_cast<unsigned char>(host[i]) == 0xff;
  return {std::sqrt(error2 / norm2), worst, guard};
}
std::vector<double> Expected(const GemmArgs& p, int64_t step) {
  const int64_t rows = (p.m + step - 1) / step;
  double* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, rows * p.n * 8));
  Reference<<<dim3((p.n + 127) / 128, rows), 128>>>(p, step, rows, device);
  std::vector<double> host(rows * p.n);
  CHECK_CUDA(cudaMemcpy(host.data(), device, host.size() * 8, cudaMemcpyDeviceToHost));
  cudaFree(device);
  return host;
}
void Poison(const GemmArgs& p) {
  CHECK_CUDA(cudaMemset(p.out, 0xff, Problem::OutBytes(p.m, p.n, IsF32(p)) + Problem::kGuard));  // NaNs
}

bool Wanted(const char* name, const char* list) {
  if (list == nullptr) return true;
  const std::string all = std::string(",") + list + ",", one = std::string(",") + name + ",";
  return all.find(one) != std::string::npos;
}

int Check(const char* list) {
  const int64_t shapes[][3] = {{256, 128, 128},    {8, 8, 16},         {512, 768, 1024},
                               {264, 136, 272},    {1000, 1384, 2064}, {2048, 4096, 512},
                               {4100, 264, 1152}, {200, 9000, 384}};
  int wrong = 0;
  for (const auto& [m, n, k] : shapes) {
    for (int kind = 0; kind < 4; ++kind) {
      const bool vector_b = kind & 1, f32 = kind & 2;
      Problem problem(m, n, k, vector_b, f32, m % 512 == 0, 1);
      const std::vector<double> expected = Expected(problem.args, 1);
      for (const Variant& v : kVariants) {
        if (v.vector_b != vector_b || !Wanted(v.name, list)) continue;
        Poison(problem.args);
        CHECK_CUDA(v.Launch(problem.args));
        CHECK_CUDA(cudaDeviceSynchronize());
        const Errors e = Compare(problem.args, expected, 1);
        // bf16 rounds by 2^-9 at most; the tensor cores keep some 13 bits below the largest product of 32.
        const bool ok = e.guard && e.l2 < (f32 ? 3e-4 : 2.2e-3) && e.max < (f32 ? 3e-3 : 5e-3);
        wrong += !ok;
        std::printf("%-9s %s %5ld %5ld %5ld  l2 %.2e  max %.2e%s%s\n", v.name, f32 ? "f32 " : "bf16", long(m),
                    long(n), long(k), e.l2, e.max, e.guard ? "" : "  WRITES BEYOND", ok ? "" : "  WRONG");
        std::fflush(stdout);
      }
    }
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}

// Short runs after pauses, so that no one's heat is another's clock, in an order of its own in each of kRounds rounds;
// or `sustained`: each for 0.25 s, of which the last third counts.
int Time(int64_t m, int64_t n, int64_t k, bool vector_b, bool sustained, const char* list) {
  constexpr int kRounds = 7;
  static CublasLt lt;
  const size_t set_bytes = (m + n) * k + 2 * m * n;
  const int sets = std::max<int>(2, std::min<int64_t>(8, (300 << 20) / set_bytes));
  std::vector<std::unique_ptr<Problem>> problems;
  for (int i = 0; i < sets; ++i) problems.push_back(std::make_unique<Problem>(m, n, k, vector_b, false, false, i + 1));

  struct Entry {
    std::string name;
    std::function<void(int set)> run;
    std::vector<Stopwatch::Reading> readings = {};
    Errors errors = {};
  };
  std::vector<Entry> entries;
  const CublasLt::Plan block = lt.Prepare(problems[0]->args, true, false);
  const CublasLt::Plan fast = lt.Prepare(problems[0]->args, false, true);
  for (size_t i = 0; i < block.algorithms.size() && i < 3; ++i)
    entries.push_back({"lt_block_" + std::to_string(i), [&, i](int s) { lt.Run(block, i, problems[s]->args); }});
  if (!fast.algorithms.empty())
    entries.push_back({"lt_tensor_fast", [&](int s) { lt.Run(fast, 0, problems[s]->args); }});
  for (const Variant& v : kVariants)
    if (v.vector_b == vector_b && Wanted(v.name, list))
      entries.push_back({v.name, [&](int s) { CHECK_CUDA(v.Launch(problems[s]->args)); }});

  // Values of a few rows; the per-tensor product has other scales.
  const int64_t step = std::max<int64_t>(1, m / 8 + 1);
  const std::vector<double> expected = Expected(problems[0]->args, step);
  for (Entry& e : entries) {
    Poison(problems[0]->args);
    e.run(0);
    CHECK_CUDA(cudaDeviceSynchronize());
    e.errors = Compare(problems[0]->args, expected, step);
  }

  Stopwatch watch;
  const double flops = 2.0 * m * n * k;
  const auto times = [&](double seconds) { return std::max(4, static_cast<int>(seconds * 1.1e15 / flops)); };
  const auto measure = [&](Entry& e, double seconds) {
    return watch.Measure(times(seconds), [&](int i) { e.run((i + 1) % sets); });
  };
  std::mt19937 random(1);
  for (int round = sustained ? 0 : -1; round < (sustained ? 1 : kRounds); ++round) {
    std::vector<int> order(entries.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      Entry& e = entries[i];
      if (sustained) {
        measure(e, 0.17);
        e.readings.push_back(measure(e, 0.08));
        continue;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      measure(e, 1e-3);
      const Stopwatch::Reading reading = measure(e, 4e-3);
      if (round >= 0) e.readings.push_back(reading);
    }
  }
  for (Entry& e : entries) {
    std::sort(e.readings.begin(), e.readings.end(), [](const auto& a, const auto& b) { return a.ms < b.ms; });
    const auto [ms, mhz] = e.readings[e.readings.size() / 2];
    // Of the 4096 multiply-adds a cycle of a multiprocessor.
    const double use = flops / (ms * 1e-3 * mhz * 1e6 * 132 * 8192);
    std::printf(
        "{\"shape\": [%ld, %ld, %ld], \"b\": \"%s\", \"how\": \"%s\", \"name\": \"%s\", \"ms\": %.4f, "
        "\"min_ms\": %.4f, \"max_ms\": %.4f, \"tflops\": %.0f, \"mhz\": %.0f, \"peak_share\": %.3f, \"l2\": %.2e}\n",
        long(m), long(n), long(k), vector_b ? "1x128" : "128x128", sustained ? "sustained" : "burst", e.name.c_str(),
        ms, e.readings.front().ms, e.readings.back().ms, flops / ms / 1e9, mhz, use, e.errors.l2);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return Check(argc > 2 ? argv[2] : nullptr);
  if ((mode == "burst" || mode == "sustained") && argc > 3) {
    const bool vector_b = std::string(argv[2]) == "vector";
    const std::string last = argv[argc - 1];
    const bool named = last.find("x128") != std::string::npos;
    for (int i = 3; i < argc - named; ++i) {
      long m, n, k;
      if (std::sscanf(argv[i], "%ldx%ldx%ld", &m, &n, &k) != 3) break;
      Time(m, n, k, vector_b, mode == "sustained", named ? last.c_str() : nullptr);
    }
    return 0;
  }
  std::fprintf(stderr, "usage: %s check [names] | burst|sustained block|vector MxNxK... [names]\n", argv[0]);
  return 2;
}
