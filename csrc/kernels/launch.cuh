// Kernels whose launch overlaps the end of the one before them on the stream (programmatic dependent launch): their
// blocks are in place, and their launch latency has passed, when it completes.
//
// A kernel that is launched with Launch() calls AwaitPredecessor() before it touches memory, also memory that it only
// writes: what ran before may still be reading there. The wait ends when the predecessor has completed and its writes
// are visible; as every kernel here waits, so has all that came before. A kernel of others that is launched the usual
// way starts when ours have completed.
#ifndef TE_JAX_KERNELS_LAUNCH_CUH_
#define TE_JAX_KERNELS_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <utility>

namespace te_jax::kernels {

// Also says that the next kernel may take its place: it does once every block of this one is running or done.
__device__ inline void AwaitPredecessor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Queues kernel<<<blocks, threads, shared_bytes, stream>>>(args...).
template <class... Params, class... Args>
cudaError_t LaunchWithShared(void (*kernel)(Params...), dim3 blocks, unsigned threads, size_t shared_bytes,
                             cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

template <class... Params, class... Args>
cudaError_t Launch(void (*kernel)(Params...), dim3 blocks, unsigned threads, cudaStream_t stream, Args&&... args) {
  return LaunchWithShared(kernel, blocks, threads, 0, stream, std::forward<Args>(args)...);
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_LAUNCH_CUH_
