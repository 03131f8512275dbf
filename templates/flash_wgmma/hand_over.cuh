// hand_over.cuh: results that one warpgroup leaves in global memory for one warpgroup of another block of the launch,
// which takes them when they are there. `given_gmem` is a word that holds 0 before and after.
#include "device/ptx/flags.cuh"

// By one thread, after a barrier behind all writes: what comes before the barrier is visible to the taker.
__device__ __forceinline__ void give(uint32_t* given_gmem) { release_one(given_gmem); }
// By one thread, before a barrier in front of all reads. The giver is a block of a lower number, which waits for
// nothing in return. Blocks begin in the order of their numbers, on which CUB's scans rely as well
// (cub/agent/agent_scan.cuh: "Blocks are launched in increasing order"); so the giver is running or done, whatever else
// the GPU runs.
__device__ __forceinline__ void take(uint32_t* given_gmem) {
  while (acquire_and_clear(given_gmem) == 0) {}
}
