// last_block.cuh: which of `blocks` blocks is the last to arrive at a counter in global memory that was 0, and is 0
// again afterwards.
#include "device/ptx/element.cuh"

// By all threads of the block; `ticket_smem` is any word of shared memory that is free. What all blocks wrote before is
// visible to the last one after.
__device__ __forceinline__ bool is_last_block(uint32_t* counter_gmem, int blocks, uint32_t* ticket_smem) {
  __syncthreads();  // all writes of the block come before thread 0's release, which hands them on
  if (threadIdx.x == 0) {
    uint32_t ticket;  // inc wraps to 0 after blocks - 1: ready for the next launch
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(counter_gmem), "r"(blocks - 1)
                 : "memory");
    *ticket_smem = ticket;
  }
  __syncthreads();  // the ticket is visible, and all that thread 0 acquired with it
  return *ticket_smem == uint32_t(blocks - 1);
}
