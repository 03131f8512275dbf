// tma.cuh: boxes of a tensor between global and shared memory by the tensor copy engine (sm_90). The map says shape,
// strides, box and swizzle; coordinates are in elements, innermost first. What lies outside the tensor reads zero,
// counts among the bytes that arrive all the same, and is not written.
#include "device/ptx/element.cuh"

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};  // a CUtensorMap, passed by value as a __grid_constant__

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The bytes of the box arrive at `barrier_smem`.
__device__ __forceinline__ void tma_load_4d(uint32_t destination_smem, const TensorMap& map, uint32_t barrier_smem,
                                            int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination_smem),
      "l"(&map), "r"(barrier_smem), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(uint32_t destination_smem, const TensorMap& map, uint32_t barrier_smem,
                                            int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination_smem),
      "l"(&map), "r"(barrier_smem), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, uint32_t source_smem, int x0, int x1, int x2,
                                             int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source_smem), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
__device__ __forceinline__ void tma_store_5d(const TensorMap& map, uint32_t source_smem, int x0, int x1, int x2, int x3,
                                             int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(source_smem), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when all but the newest PENDING of this thread's committed stores have read their shared memory, which may
// then be overwritten, or the block end.
template <int PENDING = 0> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Returns when all of them are done, and what they wrote is visible to this thread.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// This thread's writes to shared memory are visible to copies that are issued after a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same of global memory: what this thread may read, copies that it issues from here on may.
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
