#include "csrc/kernels/activation_grad.h"
#include "csrc/kernels/activation_math.cuh"
#include "csrc/kernels/block_pass.cuh"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/group_pass.cuh"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

// y = dy act'(x), [rows, cols]. Gated, with x = (g, u): y = (dy u act'(g), dy act(g)), [rows, 2 cols]; both halves come
// from one read of dy, g and u.
template <class T, class Act, bool kGated>
struct ActivationGradLoader {
  using Element = T;
  static constexpr int kOutputs = kGated ? 2 : 1;
  struct Fragment {
    Chunk<T, kChunk> dy, x[kOutputs];  // as they lie in memory
  };
  struct Column {};

  Act act;
  const T* dy;
  const T* x;
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const {
    fragment.dy.Load(dy + row * cols + col);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) fragment.x[i].Load(x + (row * kOutputs + i) * cols + col);
  }
  __device__ void LoadColumn(int64_t, Column&) const {}
  __device__ void Compute(int64_t, const Fragment& fragment, const Column&, float (&y)[kOutputs][kChunk]) const {
    float grad[kChunk], gate[kChunk];
    Unpack(fragment.dy, grad);
    Unpack(fragment.x[0], gate);
    ValueAndSlope at[kChunk];
    if constexpr (kGated) {
      float linear[kChunk];
      Unpack(fragment.x[1], linear);
      if constexpr (Act::kIsAny) {
        if (act.desc.gate_second) Swap(gate, linear);
      }
      ApplyClamped(gate, linear, at);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        y[0][i] = grad[i] * linear[i] * at[i].slope;
        y[1][i] = grad[i] * at[i].value;
      }
      if constexpr (Act::kIsAny) {
        if (act.desc.gate_second) Swap(y[0], y[1]);
      }
      Round<T>(y[1]);
    } else {
      act.template Apply<T>(gate, at);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) y[0][i] = grad[i] * at[i].slope;
    }
    Round<T>(y[0]);
  }

  // act(g) and act'(g), with the clamps if there are any: `linear` is clamped and offset, and no gradient comes back
  // from beyond a limit.
  __device__ void ApplyClamped(const float (&gate)[kChunk], float (&linear)[kChunk],
                               ValueAndSlope (&at)[kChunk]) const {
    if constexpr (!Act::kIsAny) {
      act.template Apply<T>(gate, at);
    } else {
      const bool clamped = act.desc.clamped;
      const float limit = act.desc.limit;
      float inner[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) inner[i] = clamped ? ClampAbove(gate[i], limit) : gate[i];
      act.template Apply<T>(inner, at);
      if (!clamped) return;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (gate[i] > limit) at[i].slope = 0.0f;
        if (fabsf(linear[i]) > limit) at[i].value = 0.0f;
        linear[i] = Clamp(linear[i], limit) + act.desc.linear_offset;
      }
    }
  }
};

}  // namespace

size_t ActivationGradWorkspaceBytes(const ActivationGradArgs& args) {
  return PassWorkspace::Bytes(args.rows, args.cols * (args.activation.gated ? 2 : 1), args.out);
}

cudaError_t LaunchActivationGrad(const ActivationGradArgs& args, void* workspace, cudaStream_t stream) {
  return DispatchFloat(args.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return DispatchActivation(args.activation, [&](auto act, auto gated) {
      const ActivationGradLoader<T, decltype(act), gated()> loader{act, static_cast<const T*>(args.dy),
                                                                   static_cast<const T*>(args.x), args.cols};
      if (args.out.groups > 0) return LaunchGroupPass(loader, args.rows, args.cols, args.out, workspace, stream);
      return LaunchQuantizingPass(loader, args.rows, args.cols, args.out, workspace, stream);
    });
  });
}

}  // namespace te_jax::kernels
