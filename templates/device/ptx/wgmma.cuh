// wgmma.cuh: around wgmma.mma_async (sm_90a), the asynchronous matrix product of a warpgroup (four warps). The product
// itself has an operand for each accumulator, which C++ cannot repeat: evoattn/families/flash_wgmma/text.py writes it.
#include "device/ptx/element.cuh"

// Before the first product, and between a change of its registers and the next.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most PENDING of the newest committed groups are still under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler does not know that products under way write `x`: nothing that uses it may move above this line.
template <int FLOATS> __device__ __forceinline__ void pin_registers(float (&x)[FLOATS]) {
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int WORDS> __device__ __forceinline__ void pin_registers(uint32_t (&x)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Descriptor of an operand in shared memory with the 128-byte swizzle, in 64-column chunks of 128-byte rows (PTX ISA,
// matrix descriptor). `leading_bytes` is the distance of two chunks where the chunks run along M or N, and not used
// where they run along K; eight rows take 1024 bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address_smem, uint32_t leading_bytes) {
  return uint64_t((address_smem & 0x3FFFF) >> 4) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(1024 >> 4) << 32 |
         1ull << 62;
}
// What to add to a descriptor to move its start by `bytes`.
constexpr __device__ __forceinline__ uint64_t descriptor_step(int bytes) { return uint64_t(bytes >> 4); }
