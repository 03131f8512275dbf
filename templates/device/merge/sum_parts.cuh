// sum_parts.cuh: blocks leave results for one another in global memory and share out the adding up: each owns a part of
// it. An owner waits until all results are there, but not for long. Whoever brings the last result to a part whose
// owner has left adds it up instead. So it does not matter which of the blocks run at once: they may be of a launch
// beside others that hold the SMs. A part's word in global memory holds 0 before and after: results that are there, and
// OWNER_LEFT.
#include "device/ptx/element.cuh"

constexpr uint32_t OWNER_LEFT = 1u << 31;
constexpr int MOST_LOOKS = 4096;  // of an owner at its part: some 2 ms, and blocks of one wave begin µs apart

// By one thread for each part, after a barrier behind all writes of this block's result: it is there. What was there
// before; nobody waits for that until it is used.
__device__ __forceinline__ uint32_t bring_result(uint32_t* part_gmem) {
  uint32_t before;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(part_gmem) : "memory");
  return before;
}
__device__ __forceinline__ uint32_t look_at_part(const uint32_t* part_gmem) {
  uint32_t there;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(part_gmem) : "memory");
  return there;
}

// By the thread of its owner, which has brought its own result: false if it leaves. Else all threads may read all of
// the RESULTS results after another barrier.
template <int RESULTS> __device__ __forceinline__ bool await_results(uint32_t* part_gmem) {
  uint32_t there;
#pragma unroll 1
  for (int look = 0; look < MOST_LOOKS; ++look) {
    there = look_at_part(part_gmem);
    if (there == RESULTS) break;
  }
  if (there != RESULTS) {
    asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
                 : "=r"(there)
                 : "l"(part_gmem), "r"(OWNER_LEFT)
                 : "memory");
    if (there != RESULTS) return false;
  }
  *part_gmem = 0;  // ready for the next launch
  return true;
}
// By the same thread that brought it, whether the result was the last one to a part whose owner had left; then as
// above.
template <int RESULTS> __device__ __forceinline__ bool takes_part(uint32_t* part_gmem, uint32_t before) {
  if (before != OWNER_LEFT + RESULTS - 1) return false;
  look_at_part(part_gmem);  // acquires the results
  *part_gmem = 0;
  return true;
}
