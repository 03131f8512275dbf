// grid_dependency.cuh: a launch and the one before it on its stream, where the later one may begin early (sm_90;
// nothing elsewhere).

// Waits until the launch before has ended and what it wrote is visible; so has what that one waited for. Every thread
// calls it before it touches what earlier launches of the call write, or writes what they read. A pointer to what they
// write is no `const T* __restrict__`: the compiler would load through the read-only path, which no wait makes anew.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next launch begin, once a thread of every block has called it or its block has ended: it says nothing of
// what is written. All blocks of this launch have begun by then, so that none is kept waiting for a place that a block
// of the next has taken.
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
