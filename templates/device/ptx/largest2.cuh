// largest2.cuh: magnitudes of pairs of 16-bit elements, one instruction for two. NaN is less than every number.
#include "device/ptx/element.cuh"

// Of each half the larger of `most` and the magnitude of x.
__device__ __forceinline__ uint32_t larger2(uint32_t most, uint32_t x, Fp16) {
  uint32_t y;
  asm("{\n.reg .b32 size;\nabs.f16x2 size, %2;\nmax.f16x2 %0, %1, size;\n}" : "=r"(y) : "r"(most), "r"(x));
  return y;
}
__device__ __forceinline__ uint32_t larger2(uint32_t most, uint32_t x, Bf16) {
  uint32_t y;
  asm("{\n.reg .b32 size;\nabs.bf16x2 size, %2;\nmax.bf16x2 %0, %1, size;\n}" : "=r"(y) : "r"(most), "r"(x));
  return y;
}
