// tanh.cuh: the hyperbolic tangent by the special-function unit, relative error 2^-11 (PTX ISA, tanh.approx; sm_75).
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
