#include "csrc/gemm/own_kernels.h"

#include "csrc/gemm/plan_block.h"
#include "csrc/kernels/block_gemm.h"

namespace te_jax::gemm {
namespace {

template <int kTileRows, Scaling kRhs>
OwnKernel BlockKernel(const char* name, OwnAlgorithm algorithm) {
  return {name, algorithm, [](const GemmDesc& desc) { return WhyNotBlockGemm(desc, kRhs); },
          [](const GemmArgs& args, cudaStream_t stream) { return kernels::LaunchBlockGemm(args, kTileRows, stream); }};
}

}  // namespace

// The numbers are in files of choices: a kernel that is gone leaves its own unused.
const std::vector<OwnKernel>& OwnKernels() {
  static const auto* kernels = new std::vector<OwnKernel>{
      BlockKernel<256, Scaling::kBlock128x128>("block GEMM, 1x128 by 128x128, tiles of 256 rows", {1, 1}),
      BlockKernel<256, Scaling::kBlock1x128>("block GEMM, 1x128 by 1x128, tiles of 256 rows", {2, 1}),
      BlockKernel<192, Scaling::kBlock1x128>("block GEMM, 1x128 by 1x128, tiles of 192 rows", {3, 1}),
  };
  return *kernels;
}

const OwnKernel* OwnKernelOf(const AlgorithmBlob& algorithm, const GemmDesc& desc) {
  for (const OwnKernel& kernel : OwnKernels()) {
    if (BlobOf(kernel.algorithm) == algorithm && kernel.why_not(desc).empty()) return &kernel;
  }
  return nullptr;
}

}  // namespace te_jax::gemm
