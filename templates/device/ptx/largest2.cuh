// largest2.cuh: magnitudes of pairs of 16-bit elements, one instruction for two. NaN is less than every number.
#include "device/ptx/element.cuh"

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.4028235e38f; }

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
// `sum` + the magnitudes of x / SUMMED_SIZE, which no sum of 64 takes beyond fp16.
template <class Element> constexpr float SUMMED_SIZE = 1.f;
template <> constexpr float SUMMED_SIZE<Fp16> = 256.f;
// From which on the largest magnitude is far above what such a sum of 256 loses: 2^-17 of each.
template <class Element> constexpr float LEAST_SUMMED = 0.f;
template <> constexpr float LEAST_SUMMED<Fp16> = 0.125f;
__device__ __forceinline__ uint32_t add_sizes(uint32_t sum, uint32_t x, Fp16) {
  uint32_t y;
  asm("{\n.reg .b32 size;\nabs.f16x2 size, %2;\nfma.rn.f16x2 %0, size, %3, %1;\n}"
      : "=r"(y)
      : "r"(sum), "r"(x), "r"(0x1c001c00));
  return y;
}
__device__ __forceinline__ uint32_t add_sizes(uint32_t sum, uint32_t x, Bf16) {
  uint32_t y;
  asm("{\n.reg .b32 size;\nabs.bf16x2 size, %2;\nadd.rn.bf16x2 %0, %1, size;\n}" : "=r"(y) : "r"(sum), "r"(x));
  return y;
}
// Infinities as NaN, which has no size and no number.
template <class Element> __device__ __forceinline__ uint32_t without_infinities(uint32_t pair) {
  float low, high;
  unpack2(pair, Element{}, low, high);
  return is_finite(low) ? is_finite(high) ? pair : pair | 0x7fff0000u : is_finite(high) ? pair | 0x7fffu : 0x7fff7fffu;
}
