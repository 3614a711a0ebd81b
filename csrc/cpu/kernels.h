// Host kernels: the executable specification of every primitive. Each returns false only where memory for its scratch
// can't be had. They compute in fp32, one row at a time, and keep subnormals (csrc/cpu/float_env.h).
#ifndef TE_JAX_CPU_KERNELS_H_
#define TE_JAX_CPU_KERNELS_H_

#include "csrc/core/args.h"
#include "csrc/core/grouped_args.h"

namespace te_jax::cpu {

[[nodiscard]] bool Quantize(const QuantizeArgs& args);
[[nodiscard]] bool Dequantize(const DequantizeArgs& args);
[[nodiscard]] bool Norm(const NormArgs& args);
[[nodiscard]] bool NormGrad(const NormGradArgs& args);
[[nodiscard]] bool Activation(const ActivationArgs& args);
[[nodiscard]] bool ActivationGrad(const ActivationGradArgs& args);
[[nodiscard]] bool Gemm(const GemmArgs& args);
[[nodiscard]] bool SumPartials(const SumPartialsArgs& args);
[[nodiscard]] bool GroupedGemm(const GroupedGemmArgs& args);
[[nodiscard]] bool GroupedWgrad(const GroupedWgradArgs& args);
[[nodiscard]] bool ScaleRead(const ScaleReadArgs& args);
[[nodiscard]] bool ScaleWrite(const ScaleWriteArgs& args);

// The Fortran BLAS routine that Gemm multiplies with: column major, 32-bit sizes. Set once, before the first GEMM.
using SgemmFn = void (*)(char* transa, char* transb, int* m, int* n, int* k, float* alpha, float* a, int* lda, float* b,
                         int* ldb, float* beta, float* c, int* ldc);
void SetSgemm(SgemmFn sgemm);
bool HasSgemm();

}  // namespace te_jax::cpu

#endif  // TE_JAX_CPU_KERNELS_H_
