// chunk_products.cuh: the two products of attention, a chunk of head_dim or of keys at a time, for the rows and columns
// of one warp. Both operands come from shared memory.
#include "device/ptx/element.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/copy/swizzle.cuh"
#include "device/mma/flash_fragments.cuh"

// S += Q Kᵀ over STEPS k16 steps of head_dim.
template <typename Element, typename Layout, int STEPS, int ROW_TILES, int KEY_TILES>
__device__ __forceinline__ void add_qk(float (&s)[ROW_TILES][KEY_TILES][4],
                                       uint32_t q_smem,    // [16 ROW_TILES, 16 STEPS], rows_first
                                       uint32_t k_smem) {  // [8 KEY_TILES, 16 STEPS], chunks_first
#pragma unroll
  for (int d = 0; d < STEPS; ++d) {
    uint32_t q[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) ldmatrix_x4(q[m], Layout::block_address(q_smem, m, d));
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2) {
      uint32_t k[4];  // dims 0-7, 8-15 of keys 0-7, then of keys 8-15
      ldmatrix_x4(k, Layout::block_address(k_smem, n / 2, d));
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        mma_m16n8k16<Element>(s[m][n], q[m], k[0], k[1]);
        mma_m16n8k16<Element>(s[m][n + 1], q[m], k[2], k[3]);
      }
    }
  }
}

// O += P V over STEPS k16 steps of keys. The warp has every COLUMN_WARPS-th block of 16 columns: those addresses stay a
// constant apart under the swizzle, COLUMN_WARPS being a power of two.
template <typename Element, typename PLayout, typename VLayout, int STEPS, int COLUMN_WARPS, int ROW_TILES,
          int DIM_TILES>
__device__ __forceinline__ void add_pv(
    RowState<ROW_TILES, DIM_TILES>& state,
    uint32_t p_smem,    // [16 ROW_TILES, 16 STEPS], rows_first
    uint32_t v_smem) {  // [16 STEPS, columns of all warps], rows_first of its own first block
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    uint32_t p[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) ldmatrix_x4(p[m], PLayout::block_address(p_smem, m, k));
#pragma unroll
    for (int d = 0; d < DIM_TILES / 2; ++d) {
      uint32_t v[4];  // transposed: keys 0-7, 8-15 of dims 0-7, then of dims 8-15
      ldmatrix_x4_trans(v, VLayout::block_address(v_smem, k, d * COLUMN_WARPS));
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        mma_m16n8k16<Element>(state.o[m][2 * d], p[m], v[0], v[1]);
        mma_m16n8k16<Element>(state.o[m][2 * d + 1], p[m], v[2], v[3]);
      }
    }
  }
}
