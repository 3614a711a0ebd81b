#include "csrc/kernels/block_pass.cuh"
#include "csrc/kernels/dispatch.h"
#include "csrc/kernels/group_pass.cuh"
#include "csrc/kernels/quantize.h"
#include "csrc/kernels/quantizing_pass.cuh"

namespace te_jax::kernels {
namespace {

// y = x.
template <class T>
struct TensorLoader {
  using Element = T;
  static constexpr int kOutputs = 1;
  struct Fragment {
    Chunk<T, kChunk> x;
  };
  struct Column {};

  const T* x;
  int64_t cols;

  __device__ void Load(int64_t row, int64_t col, Fragment& fragment) const { fragment.x.Load(x + row * cols + col); }
  __device__ const Chunk<T, kChunk>& Raw(const Fragment& fragment) const { return fragment.x; }
  __device__ void LoadColumn(int64_t, Column&) const {}
  __device__ void Compute(int64_t, const Fragment& fragment, const Column&, float (&y)[kOutputs][kChunk]) const {
    Unpack(fragment.x, y[0]);
  }
};

}  // namespace

size_t QuantizeWorkspaceBytes(const QuantizeArgs& args) { return PassWorkspace::Bytes(args.rows, args.cols, args.out); }

cudaError_t LaunchQuantize(const QuantizeArgs& args, void* workspace, cudaStream_t stream) {
  return DispatchFloat(args.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const TensorLoader<T> loader{static_cast<const T*>(args.x), args.cols};
    if (args.out.groups > 0) return LaunchGroupPass(loader, args.rows, args.cols, args.out, workspace, stream);
    return LaunchQuantizingPass(loader, args.rows, args.cols, args.out, workspace, stream);
  });
}

}  // namespace te_jax::kernels
