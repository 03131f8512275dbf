// red.cuh: floats added to global memory without an answer, each an atomic of its own; the order of such additions is
// nobody's. A vector of four, aligned to 16 bytes, needs sm_90.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void red_add(float* sum_gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(sum_gmem)), "f"(x) : "memory");
}
__device__ __forceinline__ void red_add(float* sums_gmem, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(sums_gmem)), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
