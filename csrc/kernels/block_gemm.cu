#include "csrc/kernels/block_gemm.h"

#include "csrc/kernels/block_gemm_launch.cuh"

namespace te_jax::kernels {
namespace {

template <int kTileRows, bool kVectorB>
cudaError_t Launch(const GemmArgs& args, cudaStream_t stream) {
  return args.out_dtype == DType::kF32
             ? LaunchBlockGemmAs<BlockGemmConfig<kTileRows, kVectorB, float>>(args, stream)
             : LaunchBlockGemmAs<BlockGemmConfig<kTileRows, kVectorB, __nv_bfloat16>>(args, stream);
}

}  // namespace

cudaError_t LaunchBlockGemm(const GemmArgs& args, int tile_rows, cudaStream_t stream) {
  const bool vector_b = args.rhs_scaling == Scaling::kBlock1x128;
  if (tile_rows == 256) return vector_b ? Launch<256, true>(args, stream) : Launch<256, false>(args, stream);
  return tile_rows == 192 && vector_b ? Launch<192, true>(args, stream) : cudaErrorInvalidValue;
}

}  // namespace te_jax::kernels
