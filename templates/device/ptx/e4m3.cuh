// e4m3.cuh: numbers of 8 bits with 4 of exponent and 3 of mantissa, up to 448; no infinity (sm_89 and newer).
#include "device/ptx/element.cuh"

// Four floats as one register, the first in the lowest byte (the order of mma fragments). What is beyond 448 becomes
// 448, NaN stays NaN.
__device__ __forceinline__ uint32_t pack4_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}
// The same of pairs of fp16.
__device__ __forceinline__ uint32_t pack4_e4m3(uint32_t x01, uint32_t x23) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "r"(x01), "r"(x23));
  return y;
}
