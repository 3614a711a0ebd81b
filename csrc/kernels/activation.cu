#include "csrc/kernels/activation.h"
#include "csrc/kernels/activation_math.cuh"
#include "csrc/kernels/block_pass.cuh"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

// y = act(x), x [rows, cols]; gated: y = act(x[:, :cols]) * x[:, cols:], x [rows, 2 cols].
template <class T, ActivationKind kind>
struct ActivationLoader {
  using Element = T;
  static constexpr int kOutputs = 1;
  static constexpr int kInputs = kGated<kind> ? 2 : 1;
  struct Fragment {
    Chunk<T, kChunk> x[kInputs];
  };
  struct Column {};

  const T* x;
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) fragment.x[i].Load(x + (row * kInputs + i) * cols + col);
  }
  __device__ void LoadColumn(int64_t, Column&) const {}
  __device__ void Compute(int64_t, const Fragment& fragment, const Column&, float (&y)[kOutputs][kChunk]) const {
    float gate[kChunk];
    Unpack(fragment.x[0], gate);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) y[0][i] = Activate<T, kBase<kind>>(gate[i]).value;
    if constexpr (kGated<kind>) {
      float linear[kChunk];
      Unpack(fragment.x[1], linear);
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
    return DispatchActivation(args.kind, [&](auto kind) {
      const ActivationLoader<T, kind()> loader{static_cast<const T*>(args.x), args.cols};
      return LaunchQuantizingPass(loader, args.rows, args.cols, args.out, workspace, stream);
    });
  });
}

}  // namespace te_jax::kernels
