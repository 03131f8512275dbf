// bulk.cuh: plain bytes between global and shared memory by the tensor copy engine (sm_90). Addresses and sizes are
// multiples of 16 bytes.
#include "device/ptx/element.cuh"

// The bytes arrive at `barrier_smem`, which expects them.
__device__ __forceinline__ void bulk_load(uint32_t destination_smem, const void* source_gmem, int bytes,
                                          uint32_t barrier_smem) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination_smem),
      "l"(source_gmem), "r"(bytes), "r"(barrier_smem)
      : "memory");
}
// Adds floats to those in global memory, each atomically. Committed and waited for as tensor stores are (tma.cuh).
__device__ __forceinline__ void bulk_add(float* destination_gmem, uint32_t source_smem, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination_gmem),
               "r"(source_smem), "r"(bytes)
               : "memory");
}
// Stores them; the same of commits and waits.
__device__ __forceinline__ void bulk_store(float* destination_gmem, uint32_t source_smem, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination_gmem), "r"(source_smem),
               "r"(bytes)
               : "memory");
}
