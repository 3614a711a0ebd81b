#include "csrc/kernels/block_gemm.h"

#include "csrc/kernels/block_gemm_launch.cuh"
#include "csrc/kernels/block_gemm_tiling.h"

namespace te_jax::kernels {
namespace {

template <bool kVectorB, class Out>
cudaError_t Launch(const BlockGemmArgs& args, cudaStream_t stream) {
  constexpr BlockGemmTiling t = TilingOf(kVectorB);
  using Config = BlockGemmConfig<t.groups, t.waves, t.stages, t.cluster, t.share_a, kVectorB, t.partials, t.ahead,
                                 t.ordered, Out>;
  return LaunchBlockGemmAs<Config>(args, t.raster, stream);
}

}  // namespace

cudaError_t LaunchBlockGemm(const BlockGemmArgs& args, cudaStream_t stream) {
  if (args.vector_b) return args.out_f32 ? Launch<true, float>(args, stream) : Launch<true, __nv_bfloat16>(args, stream);
  return args.out_f32 ? Launch<false, float>(args, stream) : Launch<false, __nv_bfloat16>(args, stream);
}

}  // namespace te_jax::kernels
