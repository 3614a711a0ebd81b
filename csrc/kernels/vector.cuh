// Sixteen consecutive elements in registers: the unit in which every kernel here reads and writes memory.
#ifndef TE_JAX_KERNELS_VECTOR_CUH_
#define TE_JAX_KERNELS_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace te_jax::kernels {

using BF16 = __nv_bfloat16;
using F16 = __half;

// Rows are multiples of 16 elements, so a chunk of 16 starts on a 16-byte boundary in every dtype, FP8 included.
constexpr int kChunk = 16;

template <class T>
struct Chunk {
  static constexpr int kVectors = sizeof(T) * kChunk / sizeof(uint4);
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

template <class T>
__device__ inline void Unpack(const Chunk<T>& chunk, float (&out)[kChunk]) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kVectors; ++i) {
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

template <class T>
__device__ inline T RoundTo(float value);
template <>
__device__ inline float RoundTo<float>(float value) { return value; }
template <>
__device__ inline BF16 RoundTo<BF16>(float value) { return __float2bfloat16_rn(value); }
template <>
__device__ inline F16 RoundTo<F16>(float value) { return __float2half_rn(value); }

// The nearest value of T, as fp32.
template <class T>
__device__ inline float Rounded(float value) { return static_cast<float>(RoundTo<T>(value)); }

template <class T>
__device__ inline void StoreRounded(const float (&values)[kChunk], T* target) {
  alignas(16) T rounded[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) rounded[i] = RoundTo<T>(values[i]);
  Chunk<T> chunk;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kVectors; ++i) chunk.vector[i] = reinterpret_cast<const uint4*>(rounded)[i];
  chunk.Store(target);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_VECTOR_CUH_
