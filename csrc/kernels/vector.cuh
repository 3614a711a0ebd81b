// Some consecutive elements in registers: the unit in which every kernel here reads and writes memory.
#ifndef TE_JAX_KERNELS_VECTOR_CUH_
#define TE_JAX_KERNELS_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace te_jax::kernels {

using BF16 = __nv_bfloat16;
using F16 = __half;

// N elements of a row. Rows are multiples of 16 elements, so with 16-byte vectors a chunk starts on its boundary.
template <class T, int N>
struct Chunk {
  static constexpr int kVectors = sizeof(T) * N / sizeof(uint4);
  uint4 vector[kVectors];

  __device__ void Load(const T* source) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vector[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
  }
  __device__ void Store(T* target) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(target)[i] = vector[i];
  }
};

__device__ inline float2 ToFloat2(uint32_t pair, BF16) {
  // bf16 is the upper half of fp32.
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ inline float2 ToFloat2(uint32_t pair, F16) { return __half22float2(reinterpret_cast<__half2&>(pair)); }

template <class T, int N>
__device__ inline void Unpack(const Chunk<T, N>& chunk, float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < Chunk<T, N>::kVectors; ++i) {
    const uint32_t words[4] = {chunk.vector[i].x, chunk.vector[i].y, chunk.vector[i].z, chunk.vector[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(T) == 4) {
        out[4 * i + j] = __uint_as_float(words[j]);
      } else {
        const float2 pair = ToFloat2(words[j], T{});
        out[8 * i + 2 * j] = pair.x;
        out[8 * i + 2 * j + 1] = pair.y;
      }
    }
  }
}

// Two values rounded to nearest even and packed, the first one low.
__device__ inline uint32_t RoundPair(float a, float b, BF16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline uint32_t RoundPair(float a, float b, F16) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

// values, each replaced by the nearest value of T.
template <class T, int N>
__device__ inline void Round(float (&values)[N]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = ToFloat2(RoundPair(values[i], values[i + 1], T{}), T{});
      values[i] = pair.x;
      values[i + 1] = pair.y;
    }
  }
}

template <class T, int N>
__device__ inline void StoreRounded(const float (&values)[N], T* target) {
  Chunk<T, N> chunk;
  uint32_t* words = reinterpret_cast<uint32_t*>(chunk.vector);
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i] = RoundPair(values[2 * i], values[2 * i + 1], T{});
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = __float_as_uint(values[i]);
  }
  chunk.Store(target);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_VECTOR_CUH_
