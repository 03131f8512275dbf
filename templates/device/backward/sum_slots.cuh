// sum_slots.cuh: few places in global memory in which the blocks of a head add up dQ, one head after another, so that
// they stay in L2. The last block of a head makes rows of the sums and leaves zeros. A slot has two words that hold 0
// before and after a launch: blocks that have added, and heads that are through.
#include "device/ptx/element.cuh"

struct SumSlot {
  uint32_t* words_gmem;
  int turn;  // heads that use the slot before this one

  // By one thread, before a barrier in front of all additions: waits for the heads before. Their blocks have lower
  // numbers, and blocks begin in the order of their numbers (see hand_over.cuh of flash_wgmma); none waits for a later
  // one.
  __device__ __forceinline__ void await_turn() const {
    uint32_t through;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(through) : "l"(words_gmem + 1) : "memory");
    while (through < turn);
  }
  // By one thread, after a barrier behind all additions of the block: whether it is the last of `blocks`. After another
  // barrier all threads of that one may read the sums.
  __device__ __forceinline__ bool is_last(int blocks) const {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(words_gmem), "r"(blocks - 1)
                 : "memory");
    return before == blocks - 1;
  }
  // By one thread of the last block, after a barrier behind all zeros. `is_final`: no head comes after this one.
  __device__ __forceinline__ void pass_on(bool is_final) const {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(words_gmem + 1), "r"(is_final ? 0 : turn + 1) : "memory");
  }
};
