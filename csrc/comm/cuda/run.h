// Carries out a schedule (csrc/comm/schedule.h) on two streams of a GPU.
#ifndef TE_JAX_COMM_CUDA_RUN_H_
#define TE_JAX_COMM_CUDA_RUN_H_

#include <cuda_runtime_api.h>

#include "csrc/comm/cuda/device_rank.h"
#include "csrc/comm/operands.h"
#include "csrc/gemm/gemm.h"

namespace te_jax::comm {

// Queues a call of a rank on `stream` and the rank's copy stream, which it joins. Every rank of the group has to make
// the same calls in the same order. Waits for nothing on the host; the current device is the rank's.
gemm::Status RunOnStreams(const CollectiveGemm& call, DeviceRank& self, cudaStream_t stream);

// Runs the products of a call without any communication, and every kernel of the channel, so that algorithms are chosen
// and kernels loaded before a peer can wait for them. No rank may be in a call: products are written into slots.
gemm::Status Warm(const CollectiveGemm& call, DeviceRank& self, cudaStream_t stream);

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_CUDA_RUN_H_
