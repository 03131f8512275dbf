// mma_m16n8k32.cuh: C[16, 8] += A[16, 32] B[32, 8] by one warp on the tensor cores: e4m3 in, fp32 out (sm_89 and
// newer), or int8 in and 32 bits out, exactly. As mma_m16n8k16.cuh has them, but four elements to a register: a[0] =
// A[g][4t..4t+3], a[2] and b1 are 16 further on (PTX ISA, matrix fragments for mma.m16n8k32). Of e4m3 cores keep fewer
// bits of the sum than fp32 has.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
