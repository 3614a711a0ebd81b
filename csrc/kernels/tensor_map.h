// Tensor maps, which the bulk tensor copies of hopper.cuh take: where a tensor is, and the boxes it is read in.
#ifndef TE_JAX_KERNELS_TENSOR_MAP_H_
#define TE_JAX_KERNELS_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

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

// A map of [planes, rows, columns] without gaps between planes, with `row_bytes` from row to row, in boxes of
// [1, box_rows, box_columns]. Of two dimensions if there are no planes (0). Elements outside are read as zeros.
inline bool MakeMap(CUtensorMap* map, const void* data, CUtensorMapDataType type, int64_t planes, int64_t rows,
                    int64_t columns, int64_t row_bytes, int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
  const EncodeTiledFn encode = EncodeTiled();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows * row_bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(map, type, planes == 0 ? 2 : 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_TENSOR_MAP_H_
