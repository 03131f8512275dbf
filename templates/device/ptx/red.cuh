// red.cuh: sums in global memory without an answer.
#include "device/ptx/element.cuh"

// Four neighbouring floats, 16-byte aligned, each added atomically (sm_90).
__device__ __forceinline__ void red_add_v4(float* sums_gmem, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums_gmem), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
