// cluster_memory.cuh: blocks of a cluster read each other's shared memory (sm_90; needs cluster.cuh).

// A barrier of all threads of all blocks of the cluster, in whole warps: what was written before it is visible after it to all of them.
__device__ __forceinline__ void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait_acquire() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive_release();
  cluster_wait_acquire();
}

// 16 bytes of any block of the cluster, at an address from `cluster_address`.
__device__ __forceinline__ float4 load_cluster_16(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}

// The sum, in the order of the BLOCKS blocks of the cluster, of the float4 that each has at `address` of its own shared memory.
template <int BLOCKS> __device__ __forceinline__ float4 sum_over_cluster(uint32_t address) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    const float4 part = load_cluster_16(cluster_address(address, block));
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  return sum;
}
