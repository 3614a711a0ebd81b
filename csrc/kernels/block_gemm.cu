#include "csrc/kernels/block_gemm.h"

#include "csrc/kernels/block_gemm_launch.cuh"

namespace te_jax::kernels {
namespace {

// Two blocks of 256 x 128, neighbours along N, that share A. csrc/gemm/plan_block.cc counts these tiles.
template <bool kVectorB, class Out>
using Config = BlockGemmConfig<2, 2, 128, 4, 2, true, kVectorB, 1, false, true, Out>;
constexpr int kRaster = 8;

}  // namespace

cudaError_t LaunchBlockGemm(const BlockGemmArgs& args, cudaStream_t stream) {
  if (args.vector_b) {
    return args.out_f32 ? LaunchBlockGemmAs<Config<true, float>>(args, kRaster, stream)
                        : LaunchBlockGemmAs<Config<true, __nv_bfloat16>>(args, kRaster, stream);
  }
  return args.out_f32 ? LaunchBlockGemmAs<Config<false, float>>(args, kRaster, stream)
                      : LaunchBlockGemmAs<Config<false, __nv_bfloat16>>(args, kRaster, stream);
}

}  // namespace te_jax::kernels
