// pairs.cuh: pairs of fp16 in a register, one instruction for two.
#include "device/ptx/element.cuh"

constexpr uint32_t LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632;  // of two registers, as byte_permute has them

// Of each half the larger, as signed integers.
__device__ __forceinline__ uint32_t larger_bits(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.s16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// NaN where one is.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// max(a b + c, 0) of both.
__device__ __forceinline__ uint32_t multiply_add_from_0(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// 2^x of both. `ex2.approx.f16x2` is two exponentials, whose halves ptxas brings together once for each use of them.
// Here `order` does, LOW_HALVES in a register whose origin is forgotten.
__device__ __forceinline__ uint32_t exp2_of_pair(uint32_t x, uint32_t order) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n.reg .b32 wide_low, wide_high;\nmov.b32 {low, high}, %1;\n"
      "ex2.approx.f16 low, low;\nex2.approx.f16 high, high;\n"
      "cvt.u32.u16 wide_low, low;\ncvt.u32.u16 wide_high, high;\nprmt.b32 %0, wide_low, wide_high, %2;\n}"
      : "=r"(y)
      : "r"(x), "r"(order));
  return y;
}
