// pack4.cuh: four floats as numbers of 8 bits in one register, the first in the lowest byte. They are rounded to the
// nearest, of two as near to the even code; what is beyond the largest number becomes it. NaN stays NaN, which int8
// does not have: it is 0 there.
#include "device/ptx/e4m3.cuh"
#include "device/ptx/eight_bits.cuh"

template <typename Number> __device__ __forceinline__ uint32_t pack4(float x0, float x1, float x2, float x3);
__device__ __forceinline__ uint32_t to_int8(float x) { return uint32_t(max(min(__float2int_rn(x), 127), -127)) & 0xff; }
template <> __device__ __forceinline__ uint32_t pack4<Int8>(float x0, float x1, float x2, float x3) {
  return to_int8(x0) | to_int8(x1) << 8 | to_int8(x2) << 16 | to_int8(x3) << 24;
}
#if __CUDA_ARCH__ >= 890
template <> __device__ __forceinline__ uint32_t pack4<E4m3>(float x0, float x1, float x2, float x3) {
  return pack4_e4m3(x0, x1, x2, x3);
}
template <> __device__ __forceinline__ uint32_t pack4<E5m2>(float x0, float x1, float x2, float x3) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}
#else
// The number's digits are a float's but for the exponent's bias; a multiple of UNIT's last digit where the exponent has
// no smaller one.
template <int MANTISSA, int BIAS> __device__ __forceinline__ uint32_t to_code(float x, float largest) {
  const float unit = __uint_as_float(uint32_t(127 + 24 - BIAS - MANTISSA) << 23);
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80, size = __float_as_uint(fminf(fabsf(x), largest));
  const uint32_t half = (1u << (22 - MANTISSA)) - 1 + (size >> (23 - MANTISSA) & 1);
  const uint32_t whole = (size + half - (uint32_t(127 - BIAS) << 23)) >> (23 - MANTISSA);
  const uint32_t small = __float_as_uint(__uint_as_float(size) + unit) - __float_as_uint(unit);
  return x != x ? 0x7f : sign | (size >> 23 > 127 - BIAS ? whole : small);
}
template <> __device__ __forceinline__ uint32_t pack4<E4m3>(float x0, float x1, float x2, float x3) {
  return to_code<3, 7>(x0, 448.f) | to_code<3, 7>(x1, 448.f) << 8 | to_code<3, 7>(x2, 448.f) << 16 |
         to_code<3, 7>(x3, 448.f) << 24;
}
template <> __device__ __forceinline__ uint32_t pack4<E5m2>(float x0, float x1, float x2, float x3) {
  return to_code<2, 15>(x0, 57344.f) | to_code<2, 15>(x1, 57344.f) << 8 | to_code<2, 15>(x2, 57344.f) << 16 |
         to_code<2, 15>(x3, 57344.f) << 24;
}
#endif
