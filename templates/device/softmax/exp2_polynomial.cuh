// exp2_polynomial.cuh: 2^x on the FMA units, for a share of the exponentials where the special-function unit is the
// limit (FlashAttention-4's idea and coefficients, flash_attn/cute: degree 3 on [0, 1)). x <= 127. Measured in NumPy on
// 4 million points of [-127, 0] against float64: relative error at most 8.8e-5 from -126 up, under the rounding of P to
// 16 bits; absolute error at most 6e-39 below, where the result falls to 0 at -127. NaN gives 0, too.
__device__ __forceinline__ float exp2_polynomial(float x) {
  x = fmaxf(x, -127.f);
  const float rounded = __fadd_rd(x, 12582912.f);  // 1.5 · 2^23: the low bits of the sum are floor(x)
  const float fraction = x - (rounded - 12582912.f);
  float y = fmaf(fraction, 0.077119089663028717f, 0.22756439447402954f);
  y = fmaf(fraction, y, 0.69514614343643188f);
  y = fmaf(fraction, y, 1.f);
  return __int_as_float((__float_as_int(rounded) << 23) + __float_as_int(y));  // floor(x) onto the exponent
}

// The same of weights that are rounded to few bits, in two instructions less: x / EXPONENTS, counted from
// LEAST_EXPONENT on and kept within 0 to 1 as it is made, takes no maximum. 2^-0.5 to 2^0.5 by degree 2: relative error
// at most 2e-3 from -126 up, none where x is whole; 0 from -127 down.
constexpr float EXPONENTS = 256.f, LEAST_EXPONENT = -127.f;
__device__ __forceinline__ float fma_saturated(float a, float b, float c) {  // NaN gives 0
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
__device__ __forceinline__ float exp2_saturated(float t) {
  constexpr float SHIFT = 12582912.f + LEAST_EXPONENT;
  const float rounded = fmaf(t, EXPONENTS, SHIFT);  // the low bits of the sum are x, rounded
  const float fraction = fmaf(t, EXPONENTS, SHIFT - rounded);
  const float y = fmaf(fraction, fmaf(fraction, 0.24f, 0.703f), 1.f);
  return __int_as_float((__float_as_int(rounded) << 23) + __float_as_int(y));
}
