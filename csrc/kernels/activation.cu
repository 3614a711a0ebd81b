#include "csrc/kernels/activation.h"
#include "csrc/kernels/activation_math.cuh"
#include "csrc/kernels/block_pass.cuh"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/group_pass.cuh"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

// y = act(x), x [rows, cols]; gated: y = act(g) u, x = (g, u) [rows, 2 cols].
template <class T, class Act, bool kGated>
struct ActivationLoader {
  using Element = T;
  static constexpr int kOutputs = 1;
  static constexpr int kInputs = kGated ? 2 : 1;
  struct Fragment {
    Chunk<T, kChunk> x[kInputs];  // as they lie in memory
  };
  struct Column {};

  Act act;
  const T* x;
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) fragment.x[i].Load(x + (row * kInputs + i) * cols + col);
  }
  __device__ void LoadColumn(int64_t, Column&) const {}
  __device__ void Compute(int64_t, const Fragment& fragment, const Column&, float (&y)[kOutputs][kChunk]) const {
    float gate[kChunk], linear[kChunk];
    Unpack(fragment.x[0], gate);
    if constexpr (kGated) Unpack(fragment.x[1], linear);
    if constexpr (kGated && Act::kIsAny) {
      if (act.desc.gate_second) Swap(gate, linear);
      if (act.desc.clamped) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          gate[i] = ClampAbove(gate[i], act.desc.limit);
          linear[i] = Clamp(linear[i], act.desc.limit) + act.desc.linear_offset;
        }
      }
    }
    ValueAndSlope at[kChunk];
    act.template Apply<T>(gate, at);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) y[0][i] = at[i].value;
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) y[0][i] *= linear[i];
    }
    Round<T>(y[0]);
  }
};

}  // namespace

size_t ActivationWorkspaceBytes(const ActivationArgs& args) {
  return PassWorkspace::Bytes(args.rows, args.cols, args.out);
}

cudaError_t LaunchActivation(const ActivationArgs& args, void* workspace, cudaStream_t stream) {
  return DispatchFloat(args.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return DispatchActivation(args.activation, [&](auto act, auto gated) {
      const ActivationLoader<T, decltype(act), gated()> loader{act, static_cast<const T*>(args.x), args.cols};
      if (args.out.groups > 0) return LaunchGroupPass(loader, args.rows, args.cols, args.out, workspace, stream);
      return LaunchQuantizingPass(loader, args.rows, args.cols, args.out, workspace, stream);
    });
  });
}

}  // namespace te_jax::kernels
