#ifndef TE_JAX_KERNELS_STATE_H_
#define TE_JAX_KERNELS_STATE_H_

#include <cuda_runtime_api.h>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// Queue the reading and the writing of FP8 state, as csrc/core/state.h has it. Arguments are checked already; return
// the launch error.
cudaError_t LaunchScaleRead(const ScaleReadArgs& args, cudaStream_t stream);
cudaError_t LaunchScaleWrite(const ScaleWriteArgs& args, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_STATE_H_
