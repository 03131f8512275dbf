// keep.cuh: numbers that stay in a register, where the compiler would rather read a special register or a constant
// again: that takes some 50 clocks, in the middle of a chain of products.
__device__ __forceinline__ void keep_in_register(int& x) { asm volatile("" : "+r"(x)); }
