// cluster_memory.cuh: blocks of a cluster read and write each other's shared memory (sm_90).
#include "device/ptx/element.cuh"

// A barrier of all threads of all blocks of the cluster, in whole warps: what was written before it is visible after it
// to all of them.
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive_release();
  cluster_wait_acquire();
}

// Into any block of the cluster, at an address from `cluster_address`.
__device__ __forceinline__ void store_cluster(uint32_t address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_cluster(uint32_t address, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
// 16 bytes of any block of the cluster, at an address from `cluster_address`.
__device__ __forceinline__ float4 load_cluster_16(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
