// What only Hopper (sm_90a) has, one PTX instruction or idiom a function: mbarriers, the bulk tensor copy engine,
// register reallocation. wgmma.cuh has the warpgroup matrix product.
#ifndef TE_JAX_KERNELS_HOPPER_CUH_
#define TE_JAX_KERNELS_HOPPER_CUH_

#include <cuda.h>

#include <cstdint>

namespace te_jax::kernels::hopper {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers, by their shared-memory address ----
__device__ inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void FenceBarrierInit() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// With TE_JAX_TRAP_CYCLES, while a kernel is developed: a wait that never ends is an error and doesn't block the GPU.
__device__ inline void Wait(uint32_t barrier, uint32_t parity) {
#ifdef TE_JAX_TRAP_CYCLES
  const int64_t start = clock64();
  for (uint32_t done = 0; done == 0;) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (clock64() - start > TE_JAX_TRAP_CYCLES) __trap();
  }
#else
  asm volatile(
      "{\n.reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni retry;\n"
      "finished:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// ---- clusters of blocks ----
// The address of what is at `address` in this block, in the block of that rank.
__device__ inline uint32_t AddressIn(uint32_t rank, uint32_t address) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
// At a barrier of any block of the cluster.
__device__ inline void ArriveIn(uint32_t rank, uint32_t barrier) {
  const uint32_t address = AddressIn(rank, barrier);
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
// All threads of the cluster that haven't ended meet here.
__device__ inline void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- bulk tensor copies ----
__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box at (x, y), x the contiguous dimension, to `target`; its bytes complete on `barrier`.
__device__ inline void LoadBox(const CUtensorMap* map, uint32_t target, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          target),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// The same of three dimensions.
__device__ inline void LoadBox(const CUtensorMap* map, uint32_t target, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same to the blocks of the cluster whose bits `ranks` has, at the same addresses in each.
__device__ inline void LoadBoxTo(uint16_t ranks, const CUtensorMap* map, uint32_t target, uint32_t barrier, int x,
                                 int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "h"(ranks), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void LoadBoxTo(uint16_t ranks, const CUtensorMap* map, uint32_t target, uint32_t barrier, int x,
                                 int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "h"(ranks), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// ---- registers ----
template <int kRegisters>
__device__ inline void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace te_jax::kernels::hopper

#endif  // TE_JAX_KERNELS_HOPPER_CUH_
