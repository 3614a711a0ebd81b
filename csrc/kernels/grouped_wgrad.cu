#include "csrc/kernels/grouped_gemm.h"
#include "csrc/kernels/grouped_gemm_launch.cuh"

namespace te_jax::kernels {
namespace {

template <class Config>
cudaError_t LaunchAs(const GroupedWgradArgs& args, cudaStream_t stream) {
  CUtensorMap a, b, c;
  const auto map = [&](CUtensorMap* result, const void* data, int64_t features, int box_features) {
    return Config::kBF16
               ? MakeGroupedMap<Config>(result, data, args.out, 0, args.tokens, features, Config::kK)
               : MakeGroupedMap<Config>(result, data, args.out, 0, features, PaddedTokens(args.tokens), box_features);
  };
  if (!map(&a, args.lhs, args.m, Config::kPartM) || !map(&b, args.rhs, args.n, Config::kPartN))
    return cudaErrorInvalidValue;
  c = a;  // never read
  if (args.c != nullptr) {
    const bool f32 = args.out_dtype == DType::kF32;
    const int columns = f32 ? Config::template kColumnsC<float> : Config::template kColumnsC<__nv_bfloat16>;
    const auto type = f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (!MakeMap(&c, args.c, type, args.groups, args.m, args.n, args.n * 128 / columns, Config::kM, columns,
                 CU_TENSOR_MAP_SWIZZLE_128B))
      return cudaErrorInvalidValue;
  }
  GroupedParams params{};
  params.tokens = static_cast<int>(args.tokens);
  params.m = static_cast<int>(args.m);
  params.n = static_cast<int>(args.n);
  params.groups = static_cast<int>(args.groups);
  params.group_sizes = args.group_sizes;
  params.scale_a = args.lhs_scale_inv;
  params.scale_b = args.rhs_scale_inv;
  params.scale_a_stride = args.lhs_scale_by_group;
  params.scale_b_stride = args.rhs_scale_by_group;
  params.c = args.c;
  params.out_f32 = args.out_dtype == DType::kF32;
  params.out = args.out;
  const int64_t works = args.groups * WorksOf<Config>(CeilDiv(args.m, Config::kM), CeilDiv(args.n, Config::kN));
  return LaunchGroupedKernel<Config>(a, b, c, params, works, stream);
}

template <DType kA, DType kB, bool kFast>
struct Launcher {
  static cudaError_t Launch(const GroupedWgradArgs& args, cudaStream_t stream) {
    return LaunchAs<GroupedConfig<Ragged::kContraction, kA, kB, false, false, kFast, 1>>(args, stream);
  }
};

}  // namespace

cudaError_t LaunchGroupedWgrad(const GroupedWgradArgs& args, cudaStream_t stream) {
  if (args.groups == 0 || args.m == 0 || args.n == 0) return cudaSuccess;
  if (args.lhs_dtype != DType::kBF16) return DispatchFP8<Launcher>(args, stream);
  // Blocks of a cluster wait for each other, which pays where tiles have many stages: docs/design/0004.
  constexpr DType kBF16 = DType::kBF16;
  return args.c != nullptr || args.tokens >= 512 * args.groups
             ? LaunchAs<GroupedConfig<Ragged::kContraction, kBF16, kBF16, true, true, true, 2>>(args, stream)
             : LaunchAs<GroupedConfig<Ragged::kContraction, kBF16, kBF16, true, true, true, 1>>(args, stream);
}

}  // namespace te_jax::kernels
