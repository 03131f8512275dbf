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
