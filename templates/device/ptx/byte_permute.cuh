// byte_permute.cuh: four of the eight bytes of two registers (PTX ISA, prmt). Nibble i of `selector` says which one
// becomes byte i: 0 to 3 of `low`, 4 to 7 of `high`.
#include "device/ptx/element.cuh"

__device__ __forceinline__ uint32_t byte_permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector));
  return y;
}
