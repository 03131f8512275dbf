// red.cuh: sums in global memory without an answer, and what they are.
#include "device/ptx/element.cuh"

// A float added atomically.
__device__ __forceinline__ void red_add(float* sum_gmem, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(sum_gmem)), "f"(x) : "memory");
}
// Four neighbouring floats, 16-byte aligned, each added atomically (sm_90).
__device__ __forceinline__ void red_add_v4(float* sums_gmem, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(sums_gmem)),
               "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
// Four neighbouring floats, 16-byte aligned, with what this thread has added to them.
__device__ __forceinline__ float4 load_relaxed(const float* sums_gmem) {
  float4 four;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(__cvta_generic_to_global(sums_gmem))
               : "memory");
  return four;
}
