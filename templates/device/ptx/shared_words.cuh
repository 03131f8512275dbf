// shared_words.cuh: words of shared memory that one thread hands to others, by relaxed atomics. What orders the two
// sides is a barrier between them; compute-sanitizer's racecheck does not follow an mbarrier, but knows that atomics do
// not race with each other.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void write_shared_word(uint32_t word_smem, int value) {
  uint32_t old;
  asm volatile("atom.relaxed.cta.shared::cta.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(word_smem), "r"(value)
               : "memory");
}
// By one thread.
__device__ __forceinline__ int read_shared_word(uint32_t word_smem) {
  uint32_t word;
  asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(word) : "r"(word_smem) : "memory");
  return int(word);
}
// By whole warps: a lane a word reads for all, which so have them before any of them goes on.
template <int WORDS>
__device__ __forceinline__ void read_shared_words(uint32_t first_smem, int lane, int (&words)[WORDS]) {
  uint32_t word = 0, address = first_smem + 4 * lane;
  if (lane < WORDS)
    asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(word) : "r"(address) : "memory");
  __syncwarp();  // the lanes that read are back: wgmma, which follows, wants whole warps
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = __shfl_sync(0xffffffffu, int(word), i);
}
