// flags.cuh: words in global memory by which blocks tell one another what is there. By one thread each; a release comes
// after a barrier behind all writes that it hands on, an acquire before one in front of all reads.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void release_one(uint32_t* word_gmem) {  // adds 1
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word_gmem) : "memory");
}
__device__ __forceinline__ uint32_t acquire(const uint32_t* word_gmem) {
  uint32_t word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(word_gmem) : "memory");
  return word;
}
__device__ __forceinline__ uint32_t acquire_and_clear(uint32_t* word_gmem) {
  uint32_t word;
  asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], 0;" : "=r"(word) : "l"(word_gmem) : "memory");
  return word;
}
// Neither: what is there; and the same, and adds 1.
__device__ __forceinline__ uint32_t peek(const uint32_t* word_gmem) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(word_gmem) : "memory");
  return word;
}
__device__ __forceinline__ uint32_t count_one(uint32_t* word_gmem) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(word_gmem) : "memory");
  return before;
}
// Both: each returns what was there before.
__device__ __forceinline__ uint32_t exchange_one(uint32_t* word_gmem) {  // adds 1
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(word_gmem) : "memory");
  return before;
}
__device__ __forceinline__ uint32_t exchange_bits(uint32_t* word_gmem, uint32_t bits) {  // sets them
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(before) : "l"(word_gmem), "r"(bits) : "memory");
  return before;
}
__device__ __forceinline__ uint32_t exchange_count(uint32_t* word_gmem, uint32_t last) {  // counts on; 0 follows `last`
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word_gmem), "r"(last) : "memory");
  return before;
}
