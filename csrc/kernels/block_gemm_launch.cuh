// Tensor maps and the launch of one configuration of the block-scaled product.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_LAUNCH_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "csrc/core/args.h"
#include "csrc/kernels/block_gemm_kernel.cuh"
#include "csrc/kernels/tensor_map.h"

namespace te_jax::kernels {

template <class Config>
cudaError_t LaunchBlockGemmAs(const GemmArgs& args, cudaStream_t stream) {
  const int64_t k_blocks = NumBlocks(args.k);
  CUtensorMap a, b, scale_a, scale_b;
  const auto fp8 = [&](CUtensorMap* map, const void* data, int64_t rows, int box_rows) {
    return MakeMap(map, data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 0, rows, args.k, args.k, box_rows, kBlockK,
                   CU_TENSOR_MAP_SWIZZLE_128B);
  };
  const auto vectors = [&](CUtensorMap* map, const float* data, int64_t rows, int box_columns) {
    return MakeMap(map, data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 0, k_blocks, rows, rows * 4, 1, box_columns,
                   CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  if (!fp8(&a, args.lhs, args.m, Config::kM) || !fp8(&b, args.rhs, args.n, Config::kN) ||
      !vectors(&scale_a, args.lhs_scale_inv, args.m, Config::kM))
    return cudaErrorInvalidValue;
  if (Config::kVectorB) {
    if (!vectors(&scale_b, args.rhs_scale_inv, args.n, Config::kN)) return cudaErrorInvalidValue;
  } else {
    scale_b = scale_a;  // not read
  }
  const BlockGemmParams params{static_cast<int>(args.m),
                               static_cast<int>(args.n),
                               static_cast<int>(k_blocks),
                               args.alpha,
                               args.beta,
                               args.rhs_scale_inv,
                               static_cast<const __nv_bfloat16*>(args.bias),
                               args.beta == 0.0f ? nullptr : args.c,
                               args.out};

  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = BlockGemmKernel<Config>;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int tiles = BlockGemmTiles::Of<Config>(params.m, params.n).Count();
  return LaunchWithShared(kernel, dim3(std::min(tiles, multiprocessors)), Config::kThreads,
                      Config::kSharedBytes, stream, a, b, scale_a, scale_b, params);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_LAUNCH_CUH_
