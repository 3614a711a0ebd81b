#ifndef TE_JAX_KERNELS_RING_CUH_
#define TE_JAX_KERNELS_RING_CUH_

#include <cstdint>

namespace te_jax::kernels {

// Place in the ring of stages.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_RING_CUH_
