// load_constant.cuh: a float that nobody writes while the kernel runs, loaded where it is asked for: the compiler may
// not move the load to where the number is used, behind what else the warp waits for.
#include "device/ptx/element.cuh"

__device__ __forceinline__ float load_constant(const float* x_gmem) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(x_gmem));
  return x;
}
