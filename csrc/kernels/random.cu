#include "csrc/kernels/random.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

namespace te_jax::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // a grid-stride loop does the rest

// A mix of 32 bits ("lowbias32"): every bit of the result depends on every bit of x.
__device__ inline uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The sum of four uniform bytes, centred: nearly normal, of standard deviation 1, at most 3.5 away from 0.
__device__ inline float NearlyNormal(uint32_t bits) {
  const int sum = static_cast<int>((bits & 0xff) + (bits >> 8 & 0xff) + (bits >> 16 & 0xff) + (bits >> 24));
  return static_cast<float>(sum - 510) / 147.8f;
}

template <class T>
__global__ void __launch_bounds__(kThreads) RandomKernel(T* values, int64_t size, uint32_t seed, float scale) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < size; i += stride) {
    values[i] = static_cast<T>(scale * NearlyNormal(Mix(static_cast<uint32_t>(i) ^ Mix(seed))));
  }
}

template <class T>
cudaError_t Launch(void* values, int64_t size, uint32_t seed, float scale, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min((size + kThreads - 1) / kThreads, kMaxBlocks));
  RandomKernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<T*>(values), size, seed, scale);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchRandom(void* values, DType dtype, int64_t size, uint32_t seed, cudaStream_t stream) {
  switch (dtype) {
    case DType::kF32: return Launch<float>(values, size, seed, 1.0f, stream);
    case DType::kBF16: return Launch<__nv_bfloat16>(values, size, seed, 1.0f, stream);
    case DType::kF16: return Launch<__half>(values, size, seed, 1.0f, stream);
    case DType::kE4M3: return Launch<__nv_fp8_e4m3>(values, size, seed, 100.0f, stream);
    case DType::kE5M2: return Launch<__nv_fp8_e5m2>(values, size, seed, 10000.0f, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace te_jax::kernels
