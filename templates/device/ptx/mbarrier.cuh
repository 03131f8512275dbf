// mbarrier.cuh: barriers in shared memory that count arrivals and bytes copied (sm_90). A barrier is 8 bytes, 8-byte
// aligned. Its phases alternate in parity, the first is 0; a phase ends when all its arrivals are made and all its
// expected bytes have come.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier_smem, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals) : "memory");
}
// After the inits, by the same threads: they are visible to the tensor copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}
// The same at a barrier of any block of the cluster, at an address from `cluster_address`.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for `bytes` more.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier_smem, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier_smem, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier_smem), "r"(parity)
               : "memory");
  return done != 0;
}
// The same at once, whatever is there.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier_smem, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier_smem), "r"(parity)
               : "memory");
  return done != 0;
}
// Returns when the phase of that parity has ended: at once if it is the one before the current phase.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier_smem, uint32_t parity) {
  while (!mbarrier_try_wait(barrier_smem, parity)) {}
}
// The same for what other blocks of the cluster have written.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier_smem, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier_smem), "r"(parity)
        : "memory");
  } while (done == 0);
}
