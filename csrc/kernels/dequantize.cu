#include <cuda_fp8.h>

#include <algorithm>

#include "csrc/kernels/dequantize.h"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/launch.cuh"
#include "csrc/kernels/vector.cuh"

namespace te_jax::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 16;               // elements of a thread: one 16-byte load
constexpr int64_t kMaxBlocks = 1 << 16;  // a grid-stride loop does the rest

// FP8 to fp32 by way of fp16, which holds every value of both formats.
__device__ inline void DecodeFour(uint32_t word, bool e5m2, float* out) {
  const __nv_fp8_interpretation_t format = e5m2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> (16 * half));
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, format)));
    out[2 * half] = values.x;
    out[2 * half + 1] = values.y;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(const uint8_t* data, bool e5m2, int64_t size, const float* scale_inv_operand, T* out) {
  AwaitPredecessor();
  const float scale_inv = *scale_inv_operand;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kChunk;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kChunk; i < size; i += stride) {
    float y[kChunk];
    if (size - i >= kChunk) {
      Chunk<uint8_t, kChunk> chunk;
      chunk.Load(data + i);
      const uint32_t words[4] = {chunk.vector[0].x, chunk.vector[0].y, chunk.vector[0].z, chunk.vector[0].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) DecodeFour(words[j], e5m2, y + 4 * j);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) y[j] = __fmul_rn(y[j], scale_inv);
      StoreRounded<T>(y, out + i);
    } else {
      for (int64_t j = i; j < size; ++j) {
        DecodeFour(data[j], e5m2, y);
        out[j] = static_cast<T>(__fmul_rn(y[0], scale_inv));  // rounds to nearest even
      }
    }
  }
}

}  // namespace

cudaError_t LaunchDequantize(const DequantizeArgs& args, cudaStream_t stream) {
  return DispatchFloat(args.out_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t chunks = (args.size + kChunk - 1) / kChunk;
    const auto blocks = static_cast<unsigned>(std::min((chunks + kThreads - 1) / kThreads, kMaxBlocks));
    return Launch(DequantizeKernel<T>, blocks, kThreads, stream, static_cast<const uint8_t*>(args.data),
                  args.in_dtype == DType::kE5M2, args.size, args.scale_inv, static_cast<T*>(args.out));
  });
}

}  // namespace te_jax::kernels
