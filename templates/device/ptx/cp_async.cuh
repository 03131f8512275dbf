// cp_async.cuh: asynchronous copies from global to shared memory (sm_80 and newer), BYTES = 4, 8 or 16, both addresses
// aligned to BYTES.
#include "device/ptx/element.cuh"

// `valid_bytes` = BYTES copies; 0 reads nothing and writes zeros. 16-byte copies bypass L1 (.cg), smaller ones cannot.
template <int BYTES>
__device__ __forceinline__ void cp_async(uint32_t destination_smem, const void* source_gmem, int valid_bytes) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination_smem), "l"(source_gmem),
                 "r"(valid_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination_smem), "l"(source_gmem), "n"(BYTES),
                 "r"(valid_bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most PENDING of this thread's newest groups are still in flight. Other threads see the data only
// after a barrier.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
