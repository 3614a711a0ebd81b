// Which GEMMs the own block-scaled kernel (csrc/kernels/block_gemm.h) can compute. Pure host code.
#ifndef TE_JAX_GEMM_PLAN_BLOCK_H_
#define TE_JAX_GEMM_PLAN_BLOCK_H_

#include <string>

#include "csrc/gemm/plan.h"

namespace te_jax::gemm {

// Why it can't compute a GEMM that MakePlan takes, with rhs scaled by `rhs_scaling` blocks; empty if it can.
std::string WhyNotBlockGemm(const GemmDesc& desc, Scaling rhs_scaling);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_PLAN_BLOCK_H_
