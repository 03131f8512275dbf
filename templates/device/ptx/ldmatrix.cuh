// ldmatrix.cuh: 8x8 blocks of 16-bit elements from shared memory into mma fragments (sm_75 and newer). Lane l gives the
// 16-byte aligned address of row l % 8 of block l / 8. Volatile, so that a load stays between the barriers around it.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&blocks)[4], uint32_t address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address_smem));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&blocks)[4], uint32_t address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address_smem));
}
// Two blocks: the addresses of lanes 16 to 31 are not used.
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&blocks)[2], uint32_t address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(blocks[0]), "=r"(blocks[1])
               : "r"(address_smem));
}
