// Tensor maps and the launch of one configuration of the block-scaled product.
#ifndef TE_JAX_KERNELS_BLOCK_GEMM_LAUNCH_CUH_
#define TE_JAX_KERNELS_BLOCK_GEMM_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>

#include "csrc/kernels/block_gemm.h"
#include "csrc/kernels/block_gemm_kernel.cuh"

namespace te_jax::kernels {

using EncodeTiledFn = decltype(&cuTensorMapEncodeTiled);

// The driver's function, or null: asked of the driver that is loaded, so that this file links against none.
inline EncodeTiledFn EncodeTiled() {
  static const EncodeTiledFn function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiledFn>(found)
                                                                         : nullptr;
  }();
  return function;
}

// A map of [rows, columns] with `row_bytes` from row to row, in boxes of [box_rows, box_columns].
inline bool MakeMap(CUtensorMap* map, const void* data, CUtensorMapDataType type, int64_t rows, int64_t columns,
                    int64_t row_bytes, int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
  const EncodeTiledFn encode = EncodeTiled();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encode(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Config>
cudaError_t LaunchBlockGemmAs(const BlockGemmArgs& args, int raster, cudaStream_t stream) {
  const int64_t k_blocks = (args.k + kBlockK - 1) / kBlockK;
  const auto padded = [](int64_t x) { return (x + 3) / 4 * 4; };
  CUtensorMap a, b, scale_a, scale_b;
  const auto fp8 = [&](CUtensorMap* map, const void* data, int64_t rows, int box_rows) {
    return MakeMap(map, data, CU_TENSOR_MAP_DATA_TYPE_UINT8, rows, args.k, args.k, box_rows, kBlockK,
                   CU_TENSOR_MAP_SWIZZLE_128B);
  };
  const auto vectors = [&](CUtensorMap* map, const float* data, int64_t rows, int box_columns) {
    return MakeMap(map, data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, k_blocks, rows, padded(rows) * 4, 1, box_columns,
                   CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  if (!fp8(&a, args.a, args.m, Config::kBoxRowsA) || !fp8(&b, args.b, args.n, Config::kBoxRowsB) ||
      !vectors(&scale_a, args.scale_a, args.m, Config::kM))
    return cudaErrorInvalidValue;
  if (Config::kVectorB) {
    if (!vectors(&scale_b, args.scale_b, args.n, Config::kN)) return cudaErrorInvalidValue;
  } else {
    scale_b = scale_a;  // not read
  }
  const BlockGemmParams params{static_cast<int>(args.m), static_cast<int>(args.n), static_cast<int>(k_blocks), args.n,
                               args.out, args.scale_b, static_cast<int>(args.ld_scale_b), raster};

  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = BlockGemmKernel<Config>;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
  if (error != cudaSuccess) return error;

  const auto tiles = [](int64_t extent, int tile) { return (extent + tile - 1) / tile; };
  const int64_t clusters = tiles(args.m, Config::kM * (Config::kShareA ? 1 : Config::kCluster)) *
                           tiles(args.n, Config::kN * (Config::kShareA ? Config::kCluster : 1));
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(Config::kCluster * std::min<int64_t>(clusters, multiprocessors / Config::kCluster));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = Config::kCluster;
  cluster[0].val.clusterDim.y = 1;
  cluster[0].val.clusterDim.z = 1;
  config.attrs = cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a, b, scale_a, scale_b, params);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_BLOCK_GEMM_LAUNCH_CUH_
