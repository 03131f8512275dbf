// last_block.cuh: which of `blocks` blocks is the last to arrive at a counter in global memory that was 0, and is 0
// again afterwards.
#include "device/ptx/flags.cuh"

// By all threads of the block; `ticket_smem` is any word of shared memory that is free. What all blocks wrote before is
// visible to the last one after.
__device__ __forceinline__ bool is_last_block(uint32_t* counter_gmem, int blocks, uint32_t* ticket_smem) {
  __syncthreads();  // all writes of the block come before thread 0's release, which hands them on
  if (threadIdx.x == 0) {
    *ticket_smem = exchange_count(counter_gmem, blocks - 1);  // 0 after it: ready for the next launch
  }
  __syncthreads();  // the ticket is visible, and all that thread 0 acquired with it
  return *ticket_smem == uint32_t(blocks - 1);
}
