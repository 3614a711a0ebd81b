#include "csrc/kernels/activation_grad.h"
#include "csrc/kernels/activation_math.cuh"
#include "csrc/kernels/block_pass.cuh"
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
    Chunk<T, kChunk> dy, x[kOutputs];
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
  __device__ void Compute(int64_t, const Fragment& fragment, const Column&, float (&y)[kOutputs][kChunk]) const {
    float grad[kChunk], gate[kChunk];
    Unpack(fragment.dy, grad);
    Unpack(fragment.x[0], gate);
    if constexpr (kGated<kind>) {
      float linear[kChunk];
      Unpack(fragment.x[1], linear);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const ValueAndSlope act = Activate<T, kBase<kind>>(gate[i]);
        y[0][i] = grad[i] * linear[i] * act.slope;
        y[1][i] = grad[i] * act.value;
      }
      Round<T>(y[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) y[0][i] = grad[i] * Activate<T, kind>(gate[i]).slope;
    }
    Round<T>(y[0]);
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
      const ActivationGradLoader<T, kind()> loader{static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                                                   args.cols};
      return LaunchQuantizingPass(loader, args.rows, args.cols, args.out, workspace, stream);
    });
  });
}

}  // namespace te_jax::kernels
