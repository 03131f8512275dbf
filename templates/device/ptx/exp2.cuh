// exp2.cuh: 2^x by the special-function unit (2 ulp over the full range; PTX ISA, ex2.approx). 2^-inf is exactly 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
