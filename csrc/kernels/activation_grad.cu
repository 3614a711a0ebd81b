#include "csrc/kernels/activation_grad.h"

#include "csrc/kernels/activation_math.cuh"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

// y = dy act'(x), [rows, cols]. Gated, with x = (g, u): y = (dy u act'(g), dy act(g)), [rows, 2 cols]; both halves come
// from one read of dy, g and u.
template <class T, ActivationKind kind>
struct ActivationGradLoader {
  using Element = T;
  static constexpr int kOutputs = kGated<kind> ? 2 : 1;
  struct Fragment {
    Chunk<T> dy, x[kOutputs];
  };
  struct Column {};

  const T* dy;
  const T* x;
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const {
    fragment.dy.Load(dy + row * cols + col);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) fragment.x[i].Load(x + (row * kOutputs + i) * cols + col);
  }
  __device__ void LoadColumn(int64_t, Column&) const {}
  __device__ void Compute(int plane, int64_t, const Fragment& fragment, const Column&, float (&y)[kChunk]) const {
    float gate[kChunk];
    Unpack(fragment.dy, y);
    Unpack(fragment.x[0], gate);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const ValueAndSlope act = Activate<kBase<kind>>(gate[i]);
      y[i] *= plane == 0 ? act.slope : act.value;
    }
    if constexpr (kGated<kind>) {
      if (plane == 0) {
        float linear[kChunk];
        Unpack(fragment.x[1], linear);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) y[i] *= linear[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) y[i] = Rounded<T>(y[i]);
  }
};

}  // namespace

size_t ActivationGradWorkspaceBytes(const ActivationGradArgs& args) {
  return PassWorkspace::Bytes(args.rows, args.cols * (IsGated(args.kind) ? 2 : 1), args.out);
}

cudaError_t LaunchActivationGrad(const ActivationGradArgs& args, void* workspace, cudaStream_t stream) {
  return DispatchFloat(args.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return DispatchActivation(args.kind, [&](auto kind) {
      const ActivationGradLoader<T, kind()> loader{static_cast<const T*>(args.dy), static_cast<const T*>(args.x), args.cols};
      return LaunchQuantizingPass(loader, args.rows, args.cols, args.out, workspace, stream);
    });
  });
}

}  // namespace te_jax::kernels
