// read_again.cuh: special registers, read anew: values that need not be kept in a register through the loop before.

// threadIdx.x % 128
__device__ __forceinline__ int thread_read_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % 128;
}
// gridDim.x
__device__ __forceinline__ int blocks_read_again() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
