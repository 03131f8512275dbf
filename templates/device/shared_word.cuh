// shared_word.cuh: a word of shared memory that one thread hands to others, by relaxed atomics. What orders the two sides is a barrier
// between them; compute-sanitizer's racecheck does not follow an mbarrier, but knows that atomics do not race with each other.
__device__ __forceinline__ void write_shared_word(uint32_t word_smem, int value) {
  uint32_t old;
  asm volatile("atom.relaxed.cta.shared::cta.exch.b32 %0, [%1], %2;" : "=r"(old) : "r"(word_smem), "r"(value) : "memory");
}
// By whole warps: lane 0 reads for all, which so have it before any of them goes on.
__device__ __forceinline__ int read_shared_word(uint32_t word_smem, int lane) {
  uint32_t value = 0;
  if (lane == 0) asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(value) : "r"(word_smem) : "memory");
  return __shfl_sync(0xffffffffu, int(value), 0);
}
