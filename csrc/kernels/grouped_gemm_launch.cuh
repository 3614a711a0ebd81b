// The launch of one configuration of the grouped product.
#ifndef TE_JAX_KERNELS_GROUPED_GEMM_LAUNCH_CUH_
#define TE_JAX_KERNELS_GROUPED_GEMM_LAUNCH_CUH_

#include <algorithm>

#include "csrc/kernels/grouped_gemm_kernel.cuh"
#include "csrc/kernels/tensor_map.h"

namespace te_jax::kernels {

// A map of [planes, rows, columns] (planes 0: [rows, columns]) in boxes of `box_rows` rows of 128 bytes. An array
// without elements is never read, but there is no map of one: `any` stands for it.
template <class Config>
bool MakeGroupedMap(CUtensorMap* map, const void* data, const void* any, int64_t planes, int64_t rows, int64_t columns,
                    int box_rows) {
  constexpr int kBytes = Config::kBF16 ? 2 : 1;
  if (rows == 0 || columns == 0) {
    data = any;
    rows = columns = 16;
  }
  return MakeMap(map, data, Config::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, planes,
                 rows, columns, columns * kBytes, box_rows, 128 / kBytes, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <class Config>
cudaError_t LaunchGroupedKernel(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& c,
                                const GroupedParams& params, int64_t works, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = GroupedGemmKernel<Config>;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t clusters = std::min<int64_t>(works, multiprocessors / Config::kCluster);
  const auto blocks = static_cast<unsigned>(Config::kCluster * clusters);
  return LaunchWithShared(kernel, dim3(blocks), Config::kThreads, Config::kSharedBytes, stream, a, b, c, params);
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// calls launch.operator()<kA, kB>() of a template functor for the operands' FP8 formats.
template <template <DType, DType, bool> class Launcher, class Args>
cudaError_t DispatchFP8(const Args& args, cudaStream_t stream) {
  const auto with_speed = [&](auto fast) {
    constexpr bool kFast = decltype(fast)::value;
    if (args.lhs_dtype == DType::kE4M3 && args.rhs_dtype == DType::kE4M3)
      return Launcher<DType::kE4M3, DType::kE4M3, kFast>::Launch(args, stream);
    if (args.lhs_dtype == DType::kE5M2 && args.rhs_dtype == DType::kE4M3)
      return Launcher<DType::kE5M2, DType::kE4M3, kFast>::Launch(args, stream);
    if (args.lhs_dtype == DType::kE4M3 && args.rhs_dtype == DType::kE5M2)
      return Launcher<DType::kE4M3, DType::kE5M2, kFast>::Launch(args, stream);
    return cudaErrorInvalidValue;
  };
  return args.fast_accumulation ? with_speed(std::true_type{}) : with_speed(std::false_type{});
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_GROUPED_GEMM_LAUNCH_CUH_
