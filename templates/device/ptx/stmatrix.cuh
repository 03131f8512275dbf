// stmatrix.cuh: 8x8 blocks of 16-bit elements from fragments to shared memory (sm_90): the reverse of ldmatrix, with
// the same lane addresses.
#include "device/ptx/element.cuh"

__device__ __forceinline__ void stmatrix_x4(uint32_t address_smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address_smem), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
// Each block transposed: a lane's pair is of two rows of a column.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address_smem, uint32_t a, uint32_t b, uint32_t c,
                                                  uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address_smem), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}
// Two blocks: the addresses of lanes 16 to 31 are not used.
__device__ __forceinline__ void stmatrix_x2(uint32_t address_smem, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address_smem), "r"(a), "r"(b)
               : "memory");
}
