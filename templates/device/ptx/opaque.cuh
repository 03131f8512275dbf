// opaque.cuh: values whose origin the compiler forgets.
#include "device/ptx/element.cuh"

// What is computed from `x` from here on is not computed ahead of the loop around: of a descriptor, some dozens of sums
// that would be kept in registers.
__device__ __forceinline__ void forget_origin(uint64_t& x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void forget_origin(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget_origin(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget_origin(int64_t& x) { asm volatile("" : "+l"(x)); }
