#include "csrc/kernels/grouped_gemm.h"

#include "csrc/kernels/grouped_gemm_launch.cuh"

namespace te_jax::kernels {
namespace {

template <class Config>
cudaError_t LaunchAs(const GroupedGemmArgs& args, cudaStream_t stream) {
  CUtensorMap a, b;
  // At least one plane: without groups nothing is read of rhs.
  const int64_t planes = std::max<int64_t>(args.groups, 1);
  const void* rhs = args.groups == 0 ? args.out : args.rhs;
  const bool columns_b = Config::kColumnsB;
  if (!MakeGroupedMap<Config>(&a, args.lhs, args.out, 0, args.tokens, args.k, Config::kPartM) ||
      !MakeGroupedMap<Config>(&b, rhs, args.out, planes, columns_b ? args.k : args.n, columns_b ? args.n : args.k,
                              columns_b ? Config::kK : Config::kPartN))
    return cudaErrorInvalidValue;
  GroupedParams params{};
  params.tokens = static_cast<int>(args.tokens);
  params.n = static_cast<int>(args.n);
  params.k = static_cast<int>(args.k);
  params.groups = static_cast<int>(args.groups);
  params.group_sizes = args.group_sizes;
  params.scale_a = args.lhs_scale_inv;
  params.scale_b = args.rhs_scale_inv;
  params.scale_a_stride = args.lhs_scale_by_group;
  params.scale_b_stride = args.rhs_scale_by_group;
  params.bias = args.bias;
  params.bias_f32 = args.bias_dtype == DType::kF32;
  params.out_f32 = args.out_dtype == DType::kF32;
  params.out = args.out;
  // Tiles, of which there are no fewer than works. The last of a group needn't be full.
  const int64_t most = (CeilDiv(args.tokens, Config::kM) + args.groups) * CeilDiv(args.n, Config::kN);
  return LaunchGroupedKernel<Config>(a, b, a, params, most, stream);
}

template <DType kA, DType kB, bool kFast>
struct Launcher {
  static cudaError_t Launch(const GroupedGemmArgs& args, cudaStream_t stream) {
    return LaunchAs<GroupedConfig<Ragged::kRows, kA, kB, false, false, kFast, 2>>(args, stream);
  }
};

}  // namespace

cudaError_t LaunchGroupedGemm(const GroupedGemmArgs& args, cudaStream_t stream) {
  if (args.tokens == 0 || args.n == 0) return cudaSuccess;
  if (args.lhs_dtype != DType::kBF16) return DispatchFP8<Launcher>(args, stream);
  constexpr DType kBF16 = DType::kBF16;
  return args.rhs_contract_first
             ? LaunchAs<GroupedConfig<Ragged::kRows, kBF16, kBF16, false, true, true, 2>>(args, stream)
             : LaunchAs<GroupedConfig<Ragged::kRows, kBF16, kBF16, false, false, true, 2>>(args, stream);
}

}  // namespace te_jax::kernels
