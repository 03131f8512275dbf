// eight_bits.cuh: storage types of 8 bits, and four of their numbers as fp16, exactly. e4m3 and e5m2 are the FP8
// formats of Micikevicius et al. (2022).
#include "device/ptx/element.cuh"

struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};
struct Int8 {
  uint8_t bits;
};

template <typename One, typename Other> struct SameType {
  static constexpr bool VALUE = false;
};
template <typename One> struct SameType<One, One> {
  static constexpr bool VALUE = true;
};

// What tensor cores multiply in place of Element where the other operand is of 8 bits.
template <typename Element, bool EIGHT_BITS> struct OperandOf {
  using type = Element;
};
template <typename Element> struct OperandOf<Element, true> {
  using type = Fp16;
};

// The power of two that brings a number to [2^TOP, 2^(TOP + 1)), and its inverse; zeros, and what is nearly zero, stay
// small.
template <int TOP = 14> struct PowerOfTwo {
  float factor, inverse;
  __device__ __forceinline__ explicit PowerOfTwo(float number) {
    const int exponent = max(int(__float_as_uint(number) >> 23) - 127, -100);
    factor = __uint_as_float(uint32_t(127 + TOP - exponent) << 23);
    inverse = __uint_as_float(uint32_t(127 - TOP + exponent) << 23);
  }
};

// Numbers 0 and 1 of a word as a pair of fp16, and 2 and 3.
template <typename Element> __device__ __forceinline__ void to_halves(uint32_t four, uint32_t& low, uint32_t& high);
template <> __device__ __forceinline__ void to_halves<E5m2>(uint32_t four, uint32_t& low, uint32_t& high) {
  low = __byte_perm(four, 0, 0x1404), high = __byte_perm(four, 0, 0x3424);  // it is the upper half of an fp16
}
template <> __device__ __forceinline__ void to_halves<Int8>(uint32_t four, uint32_t& low, uint32_t& high) {
  four ^= 0x80808080;  // from 0 to 255: the last digits of an fp16 from 1024 on
  low = __byte_perm(four, 0x64646464, 0x4140), high = __byte_perm(four, 0x64646464, 0x4342);
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x64806480));
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x64806480));
}
#if __CUDA_ARCH__ >= 890
template <> __device__ __forceinline__ void to_halves<E4m3>(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}
#else
// A pair in the upper bytes of two halves. Its digits, moved by one, are an fp16 that is 2^-8 of it, as the bias of the
// exponent is 15, not 7; the last code of all is NaN, where an fp16 has a number more.
__device__ __forceinline__ uint32_t pair_of_e4m3(uint32_t upper_bytes) {
  const uint32_t sizes = upper_bytes & 0x7f007f00, not_numbers = (sizes + 0x01000100) & 0x80008000;
  uint32_t pair = (upper_bytes & 0x80008000) | sizes >> 1;
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x5c005c00));  // by 256
  return pair | (not_numbers - (not_numbers >> 15));
}
template <> __device__ __forceinline__ void to_halves<E4m3>(uint32_t four, uint32_t& low, uint32_t& high) {
  low = pair_of_e4m3(__byte_perm(four, 0, 0x1404)), high = pair_of_e4m3(__byte_perm(four, 0, 0x3424));
}
#endif
