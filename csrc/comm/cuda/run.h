// Carries out a schedule (csrc/comm/schedule.h) on two streams of a GPU.
#ifndef TE_JAX_COMM_CUDA_RUN_H_
#define TE_JAX_COMM_CUDA_RUN_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "csrc/comm/cuda/device_group.h"
#include "csrc/comm/schedule.h"
#include "csrc/gemm/gemm.h"

namespace te_jax::comm {

struct CollectiveGemm {
  Problem problem;
  // The product of one rank without the collective: m is M (all rows) for a reduce-scatter and block_rows for an
  // all-gather, lhs the rank's operand, out its result. The bias is added once, to the final sums.
  GemmArgs gemm;
  void* kept = nullptr;  // all-gather with problem.keep: [M, K], of which the peers' blocks are written
  uint64_t timeout_ns = 120'000'000'000;
};

// Queues a call of `rank` on `stream` and the rank's copy stream, which it joins. Every rank of the group has to make
// the same calls in the same order. Waits for nothing on the host; the current device is the rank's.
gemm::Status RunOnStreams(const CollectiveGemm& call, DeviceGroup& group, int rank, cudaStream_t stream);

// Runs the products of a call without any communication, so that algorithms are chosen before a peer can wait for them.
gemm::Status Warm(const CollectiveGemm& call, DeviceGroup& group, int rank, cudaStream_t stream);

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_CUDA_RUN_H_
