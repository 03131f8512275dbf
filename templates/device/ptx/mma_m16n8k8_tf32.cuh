// mma_m16n8k8_tf32.cuh: C[16, 8] += A[16, 8] B[8, 8] by one warp on the tensor cores, tf32 in (the upper 19 bits of a
// float; the others are ignored), fp32 accumulation (sm_80 and newer). With g = lane / 4 and t = lane % 4, a lane
// holds: c[0..1] = C[g][2t..2t+1], c[2..3] = C[g+8][2t..2t+1]; a[0] = A[g][t], a[1] = A[g+8][t], a[2] = A[g][t+4], a[3]
// = A[g+8][t+4]; b0 = B[t][g], b1 = B[t+4][g] (PTX ISA, matrix fragments for mma.m16n8k8).
#include "device/ptx/element.cuh"

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = big + small to 2 or 3 of the last bits of x: big is a tf32 beside x, and of what is left, which is exact, the
// tensor cores take the upper 11 bits. big · big' + big · small' + small · big' then has fp32's precision ("3xTF32",
// CUTLASS example 27). To round, 0.7 to 1.4 of half a last bit is added by a multiply-add: cvt.rna.tf32 is two integer
// operations, which have half the rate on sm_90.
__device__ __forceinline__ void split_tf32(float x, uint32_t& big, uint32_t& small) {
  big = __float_as_uint(fmaf(x, 0.7f / 2048.f, x)) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(big));
}
