// The device side of a channel between GPUs (csrc/comm): flags, and the sum of partial results.
#ifndef TE_JAX_KERNELS_CHANNEL_H_
#define TE_JAX_KERNELS_CHANNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "csrc/core/args.h"

namespace te_jax::kernels {

// What a wait that timed out leaves behind for the host, in mapped memory. All zero: nothing has failed.
struct AwaitRecord {
  uint32_t failed;  // 1, written last
  int32_t source, chunk;
  uint32_t epoch, seen;
};

struct AwaitArgs {
  const uint32_t* flag = nullptr;  // in own memory; a peer writes it
  uint32_t epoch = 0;
  uint64_t timeout_ns = 0;
  int32_t source = 0, chunk = 0;
  AwaitRecord* record = nullptr;  // mapped host memory of the own rank
  // What the flag says has arrived. If it doesn't in time all of it becomes NaN, so that no result is wrong unnoticed;
  // a late peer may still overwrite it with what belongs there.
  void* data = nullptr;
  size_t bytes = 0;
  uint32_t nan = 0;  // NaNs in the data's dtype, four bytes of them
};

// *flag = epoch, visible to every GPU after all that came before on the stream. `flag` may be a peer's.
cudaError_t LaunchPost(uint32_t* flag, uint32_t epoch, cudaStream_t stream);

// Ends when *flag has reached the epoch (as a signed difference), or the time is over, or an earlier wait of the rank
// has failed.
cudaError_t LaunchAwait(const AwaitArgs& args, cudaStream_t stream);

// *amax = the larger of it and *value, which are magnitudes; NaN if either is.
cudaError_t LaunchMaximum(const float* value, float* amax, cudaStream_t stream);

// cols a multiple of 8; slots are read from memory that peers have written while this program ran.
cudaError_t LaunchSumPartials(const SumPartialsArgs& args, cudaStream_t stream);

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_CHANNEL_H_
