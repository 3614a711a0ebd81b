// Operands of grouped products on the GPU, and the products in fp64 for a check.
#ifndef TE_JAX_BENCHMARKS_NATIVE_GROUPED_GEMM_PROBLEM_CUH_
#define TE_JAX_BENCHMARKS_NATIVE_GROUPED_GEMM_PROBLEM_CUH_

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/native/measure.cuh"
#include "csrc/kernels/grouped_gemm.h"

namespace te_jax::kernels {

// ---- elements ----
inline int64_t BytesOf(DType dtype) { return dtype == DType::kF32 ? 4 : dtype == DType::kBF16 ? 2 : 1; }

__device__ inline double ElementAt(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kBF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  const auto format = dtype == DType::kE5M2 ? __NV_E5M2 : __NV_E4M3;
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<const uint8_t*>(data)[i], format)));
}
static __global__ void FillNormal(void* data, DType dtype, int64_t size, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    const float value = Normal(i, seed) * scale;
    if (dtype == DType::kF32) static_cast<float*>(data)[i] = value;
    else if (dtype == DType::kBF16) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value);
    else
      static_cast<uint8_t*>(data)[i] =
          __nv_cvt_float_to_fp8(value, __NV_SATFINITE, dtype == DType::kE5M2 ? __NV_E5M2 : __NV_E4M3);
  }
}
// NaNs in [rows, columns] from row `row` or column `column` on.
static __global__ void FillNaN(uint8_t* data, int64_t rows, int64_t columns, int64_t row, int64_t column) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (i / columns >= row || i % columns >= column) data[i] = 0xff;
  }
}

// ---- sizes of groups ---- "uniform"; "skewed": log-normal, sigma 1; "aligned": that, in multiples of 128; "sparse":
// skewed, and every third group is empty; "short": the same, and a tenth of the tokens is in no group; "one": all
// tokens in the last group but one; "none": all groups empty.
inline std::vector<int32_t> GroupSizes(const std::string& kind, int64_t tokens, int64_t groups, int seed) {
  std::vector<int32_t> sizes(groups, 0);
  if (kind == "none") return sizes;
  if (kind == "one") {
    sizes[std::max<int64_t>(0, groups - 2)] = static_cast<int32_t>(tokens);
    return sizes;
  }
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> weights(groups);
  for (int64_t g = 0; g < groups; ++g) {
    weights[g] = kind == "uniform" ? 1 : std::exp(normal(random));
    if ((kind == "sparse" || kind == "short") && g % 3 == 1) weights[g] = 0;
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const int64_t used = kind == "short" ? tokens - tokens / 10 : tokens;
  double sum = 0;
  for (int64_t g = 0, last = 0; g < groups; ++g) {
    sum += weights[g];
    int64_t end = std::llround(sum / total * used);
    if (kind == "aligned") end = g + 1 == groups ? used : end / 128 * 128;
    sizes[g] = static_cast<int32_t>(end - last);
    last = end;
  }
  return sizes;
}

// ---- memory ----
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() {
    for (void* p : owned_) cudaFree(p);
  }
  void* Bytes(int64_t bytes) {
    void* p = nullptr;
    CHECK_CUDA(cudaMalloc(&p, std::max<int64_t>(bytes, 16)));
    owned_.push_back(p);
    return p;
  }
  void* Normals(DType dtype, int64_t size, float scale, uint64_t seed) {
    void* p = Bytes(size * BytesOf(dtype));
    FillNormal<<<4096, 256>>>(p, dtype, size, scale, seed);
    return p;
  }
  template <class T>
  const T* Copy(const std::vector<T>& values) {
    void* p = Bytes(values.size() * sizeof(T));
    CHECK_CUDA(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<const T*>(p);
  }

 private:
  std::vector<void*> owned_;
};

constexpr int64_t kGuard = 4096;  // bytes behind a result that nobody may write

struct Case {
  bool wgrad = false;
  DType lhs = DType::kBF16, rhs = DType::kBF16, out = DType::kBF16;
  bool contract_first = false, fast = true, extra = false;  // extra: bias, or c in place
  int64_t tokens = 0, n = 0, k = 0, groups = 0;             // of wgrad: k is the result's m
  std::string sizes = "skewed";
};

inline float SpreadOf(DType dtype) { return dtype == DType::kBF16 ? 1.0f : dtype == DType::kE4M3 ? 100.0f : 4000.0f; }
inline std::vector<float> Scales(int64_t count, int seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
  std::vector<float> scales(count);
  for (float& x : scales) x = uniform(random) * 0x1p-8f;
  return scales;
}

// A case with its operands, in both structs, of which one is used. What belongs to no group is NaN.
struct GroupedProblem {
  Case what;
  std::vector<int32_t> sizes, offsets;  // offsets [groups + 1]
  Memory memory;
  GroupedGemmArgs gemm;
  GroupedWgradArgs wgrad;
  void* out;
  void* extra = nullptr;
  int64_t rows;  // of the result: tokens, or groups * m

  GroupedProblem(const Case& c, int seed) : what(c), sizes(GroupSizes(c.sizes, c.tokens, c.groups, seed)) {
    offsets.assign(1, 0);
    for (int32_t size : sizes) offsets.push_back(offsets.back() + size);
    const bool fp8 = c.lhs != DType::kBF16;
    const bool by_group = !c.wgrad || c.extra;
    const float* scale_a = fp8 ? memory.Copy(Scales(by_group ? c.groups : 1, seed + 1)) : nullptr;
    const float* scale_b = fp8 ? memory.Copy(Scales(c.groups, seed + 2)) : nullptr;
    const int32_t* device_sizes = memory.Copy(sizes);
    rows = c.wgrad ? c.groups * c.k : c.tokens;
    out = memory.Bytes(OutBytes() + kGuard);
    if (c.extra) extra = memory.Normals(c.out, c.wgrad ? rows * c.n : c.groups * c.n, 1.0f, 5);
    if (c.wgrad) {
      const int64_t columns = fp8 ? PaddedTokens(c.tokens) : c.tokens;
      wgrad = {c.tokens, c.k, c.n, c.groups, c.lhs, c.rhs, c.out, c.fast, device_sizes,
               Operand(c.lhs, c.k, columns, 1), Operand(c.rhs, c.n, columns, 2), scale_a, scale_b, by_group, true,
               c.extra ? out : nullptr, out};
    } else {
      const void* x = memory.Normals(c.lhs, c.tokens * c.k, SpreadOf(c.lhs), 1);
      FillNaN<<<1024, 256>>>(static_cast<uint8_t*>(const_cast<void*>(x)), c.tokens, c.k * BytesOf(c.lhs),
                             offsets.back(), INT64_MAX);
      const void* w = memory.Normals(c.rhs, c.groups * c.n * c.k, SpreadOf(c.rhs), 2);
      gemm = {c.tokens, c.n, c.k, c.groups, c.lhs, c.rhs, c.out, c.out, c.contract_first, c.fast, device_sizes,
              x, w, scale_a, scale_b, by_group, true, extra, out};
    }
    CHECK_CUDA(cudaGetLastError());
  }

  int64_t OutBytes() const { return rows * what.n * BytesOf(what.out); }
  void Launch() const {
    CHECK_CUDA(what.wgrad ? LaunchGroupedWgrad(wgrad, nullptr) : LaunchGroupedGemm(gemm, nullptr));
  }
  // NaNs, or c where the result is added to it.
  void Prepare() const {
    CHECK_CUDA(cudaMemset(out, 0xff, OutBytes() + kGuard));
    if (what.wgrad && what.extra) CHECK_CUDA(cudaMemcpy(out, extra, OutBytes(), cudaMemcpyDeviceToDevice));
  }

 private:
  // Of wgrad: [tokens, features], or in FP8 [features, padded tokens].
  const void* Operand(DType dtype, int64_t features, int64_t columns, uint64_t seed) {
    void* data = memory.Normals(dtype, features * columns, SpreadOf(dtype), seed);
    auto* bytes = static_cast<uint8_t*>(data);
    if (dtype == DType::kBF16)
      FillNaN<<<1024, 256>>>(bytes, what.tokens, features * 2, offsets.back(), INT64_MAX);
    else FillNaN<<<1024, 256>>>(bytes, features, columns, INT64_MAX, offsets.back());
    return data;
  }
};

// ---- in fp64: rows[i] of the result (of wgrad: group * m + row) ----
static __global__ void ReferenceRows(GroupedGemmArgs p, const int32_t* offsets, const int64_t* rows, double* out) {
  const int64_t column = blockIdx.y * int64_t{blockDim.x} + threadIdx.x, row = rows[blockIdx.x];
  if (column >= p.n) return;
  double sum = 0;
  if (row < offsets[p.groups]) {
    int g = 0;
    while (row >= offsets[g + 1]) ++g;
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t at = p.rhs_contract_first ? (g * p.k + k) * p.n + column : (g * p.n + column) * p.k + k;
      sum += ElementAt(p.lhs, p.lhs_dtype, row * p.k + k) * ElementAt(p.rhs, p.rhs_dtype, at);
    }
    if (p.lhs_scale_inv != nullptr)
      sum *= double{p.lhs_scale_inv[p.lhs_scale_by_group ? g : 0]} * p.rhs_scale_inv[p.rhs_scale_by_group ? g : 0];
    if (p.bias != nullptr) sum += ElementAt(p.bias, p.bias_dtype, g * p.n + column);
  }
  out[blockIdx.x * p.n + column] = sum;
}
// `c`: what was there before, since it may be overwritten.
static __global__ void ReferenceWgradRows(GroupedWgradArgs p, const int32_t* offsets, const int64_t* rows,
                                          const void* c, double* out) {
  const int64_t column = blockIdx.y * int64_t{blockDim.x} + threadIdx.x, row = rows[blockIdx.x];
  if (column >= p.n) return;
  const int64_t g = row / p.m, feature = row % p.m, padded = PaddedTokens(p.tokens);
  const bool bf16 = p.lhs_dtype == DType::kBF16;
  double sum = 0;
  for (int64_t t = offsets[g]; t < offsets[g + 1]; ++t) {
    sum += ElementAt(p.lhs, p.lhs_dtype, bf16 ? t * p.m + feature : feature * padded + t) *
           ElementAt(p.rhs, p.rhs_dtype, bf16 ? t * p.n + column : column * padded + t);
  }
  if (p.lhs_scale_inv != nullptr)
    sum *= double{p.lhs_scale_inv[p.lhs_scale_by_group ? g : 0]} * p.rhs_scale_inv[p.rhs_scale_by_group ? g : 0];
  if (c != nullptr) sum += ElementAt(c, p.out_dtype, row * p.n + column);
  out[blockIdx.x * p.n + column] = sum;
}

struct Errors {
  double l2, max;  // relative to the result's norm; the largest, relative to |element| + rms
  bool guard;      // nothing was written behind the result
};

// Of what is in problem.out: `count` rows (all if there are fewer).
inline Errors Compare(GroupedProblem& problem, int64_t count) {
  const Case& c = problem.what;
  if (problem.rows == 0) return {0, 0, true};
  std::vector<int64_t> rows;
  const int64_t step = std::max<int64_t>(1, problem.rows / count);
  for (int64_t row = 0; row < problem.rows; row += step) rows.push_back(row);
  if (!c.wgrad)  // both sides of each boundary
    for (int32_t at : problem.offsets)
      for (int64_t row : {at - 1, at + 0})
        if (step > 1 && rows.size() < size_t(3 * count) && row >= 0 && row < problem.rows) rows.push_back(row);
  Memory memory;
  const int64_t* device_rows = memory.Copy(rows);
  const int32_t* offsets = memory.Copy(problem.offsets);
  auto* device = static_cast<double*>(memory.Bytes(rows.size() * c.n * 8));
  const dim3 blocks(rows.size(), (c.n + 127) / 128);  // more rows than a grid has along y
  if (c.wgrad) ReferenceWgradRows<<<blocks, 128>>>(problem.wgrad, offsets, device_rows, problem.extra, device);
  else ReferenceRows<<<blocks, 128>>>(problem.gemm, offsets, device_rows, device);
  CHECK_CUDA(cudaGetLastError());
  std::vector<double> expected(rows.size() * c.n);
  CHECK_CUDA(cudaMemcpy(expected.data(), device, expected.size() * 8, cudaMemcpyDeviceToHost));

  double error2 = 0, norm2 = 0, worst = 0;
  for (double x : expected) norm2 += x * x;
  const double rms = std::sqrt(norm2 / expected.size());
  const size_t row_bytes = c.n * BytesOf(c.out);
  std::vector<char> results(rows.size() * row_bytes);
  for (size_t i = 0; i < rows.size(); i += step == 1 ? rows.size() : 1)
    CHECK_CUDA(cudaMemcpy(results.data() + i * row_bytes, static_cast<char*>(problem.out) + rows[i] * row_bytes,
                          step == 1 ? results.size() : row_bytes, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < rows.size(); ++i) {
    const char* row = results.data() + i * row_bytes;
    const double* want_row = expected.data() + i * c.n;
    const bool zeros = std::all_of(want_row, want_row + c.n, [](double x) { return x == 0; });  // of no tokens
    for (int64_t j = 0; j < c.n; ++j) {
      float value;
      if (c.out == DType::kF32) value = reinterpret_cast<const float*>(row)[j];
      else {
        const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(row)[j]} << 16;
        std::memcpy(&value, &bits, 4);
      }
      const double want = want_row[j], error = std::abs(value - want);
      error2 += error * error;
      if (zeros ? error != 0 : !std::isfinite(error)) worst = 1e30;  // those are exact
      else if (error != 0) worst = std::max(worst, error / (std::abs(want) + rms));
    }
  }
  std::vector<unsigned char> guard(kGuard);
  CHECK_CUDA(cudaMemcpy(guard.data(), static_cast<char*>(problem.out) + problem.OutBytes(), kGuard,
                        cudaMemcpyDeviceToHost));
  bool untouched = true;
  for (unsigned char byte : guard) untouched &= byte == 0xff;
  return {norm2 == 0 ? std::sqrt(error2) : std::sqrt(error2 / norm2), worst, untouched};
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_BENCHMARKS_NATIVE_GROUPED_GEMM_PROBLEM_CUH_
