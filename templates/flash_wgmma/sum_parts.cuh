// sum_parts.cuh: blocks leave results for one another in global memory and share out the adding up: each owns a part of
// it. An owner waits until all results are there, but not for long. Whoever brings the last result to a part whose
// owner has left adds it up instead. So it does not matter which of the blocks run at once: they may be of a launch
// beside others that hold the SMs. A part's word in global memory holds 0 before and after: results that are there,
// OWNER_LEFT.
#include "device/ptx/flags.cuh"

constexpr uint32_t OWNER_LEFT = 1u << 31;
constexpr int MOST_LOOKS = 4096;  // of an owner at its part: some 2 ms, and blocks of one wave begin µs apart

// By the owner, which has brought its own result. False if it leaves.
template <int RESULTS> __device__ __forceinline__ bool await_results(uint32_t* part_gmem) {
#pragma unroll 1
  for (int look = 0; look < MOST_LOOKS; ++look) {
    if (acquire(part_gmem) == RESULTS) return true;
  }
  return exchange_bits(part_gmem, OWNER_LEFT) == RESULTS;
}

// Of RESULTS results for a part, this block's is there. By one thread, after a barrier behind all writes of the result;
// `owns`: the part is this block's. Returns whether this block adds it up: after another barrier, all threads of that
// may read all results.
template <int RESULTS> __device__ __forceinline__ bool bring_result(uint32_t* part_gmem, bool owns) {
  const uint32_t before = exchange_one(part_gmem);
  bool adds = before == (owns ? RESULTS - 1 : OWNER_LEFT + RESULTS - 1);
  if (owns && !adds) adds = await_results<RESULTS>(part_gmem);
  if (adds) *part_gmem = 0;  // ready for the next launch
  return adds;
}
