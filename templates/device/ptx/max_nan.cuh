// max_nan.cuh: the greater of two numbers, NaN if one of them is; fmaxf then gives the other (PTX ISA, max.NaN).
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
