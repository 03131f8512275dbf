// named_barrier.cuh: the sixteen hardware barriers of a block, for a part of its warps. THREADS counts those that wait
// and those that only arrive.
template <int THREADS> __device__ __forceinline__ void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS> __device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
