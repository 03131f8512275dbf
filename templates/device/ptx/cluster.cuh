// cluster.cuh: blocks of a cluster write into each other's shared memory (sm_90).
#include "device/ptx/element.cuh"

// All threads of all blocks arrive, once, and wait in whole warps. Orders no memory but what `mbarrier_init_fence` did
// before: a release here would be a fence of the whole GPU (MEMBAR.ALL.GPU in SASS) before the first copy.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address, for a block of the cluster, of what lies at `address_smem` in the shared memory of block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address_smem, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address_smem), "r"(rank));
  return address;
}
// Writes 16 bytes, which arrive at `barrier`, both in the shared memory of the same block of the cluster.
__device__ __forceinline__ void store_async_16(uint32_t destination, uint32_t barrier, float a, float b, float c,
                                               float d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(destination),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}
