// shared_softmax.cuh: the online softmax of rows whose keys are spread over COLUMN_WARPS warps, which all keep the same
// shifts. Barrier 1 + row_warp is that of the warps that share rows.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/copy/swizzle.cuh"
#include "device/mma/flash_fragments.cuh"
#include "device/softmax/online_softmax.cuh"

// Combines a value per row, of rows g and g + 8 of each row tile, over the four lanes and the warps that share the row.
template <int COLUMN_WARPS, int BLOCK_M, int ROW_TILES, typename Combine>
__device__ __forceinline__ void combine_rows(float (&x)[ROW_TILES][2],
                                             float* rows_smem,  // [COLUMN_WARPS, BLOCK_M], if more than one
                                             int row_warp, int column_warp, int lane, Combine combine) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[m][half] = combine(x[m][half], __shfl_xor_sync(ALL_LANES, x[m][half], 1));
      x[m][half] = combine(x[m][half], __shfl_xor_sync(ALL_LANES, x[m][half], 2));
    }
  if constexpr (COLUMN_WARPS > 1) {
    rows_smem += row_warp * ROW_TILES * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane % 4 == 0) rows_smem[column_warp * BLOCK_M + m * 16 + half * 8] = x[m][half];
      }
    named_barrier_sync<32 * COLUMN_WARPS>(1 + row_warp);  // the values of all warps of these rows are visible to them
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[m][half] = rows_smem[m * 16 + half * 8];
#pragma unroll
        for (int w = 1; w < COLUMN_WARPS; ++w)
          x[m][half] = combine(x[m][half], rows_smem[w * BLOCK_M + m * 16 + half * 8]);
      }
  }
}

// shift = max(shift, max_j s_j · scale + room), O and sums to match; the maximum is over the keys of all warps. LAZY:
// only where a maximum reaches the shift, which then goes LAZY_OCTAVES above it.
template <Rescale RESCALE, int COLUMN_WARPS, int BLOCK_M, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void raise_shared_shift(RowState<ROW_TILES, DIM_TILES>& state,
                                                   const float (&s)[ROW_TILES][KEY_TILES][4], float scale,
                                                   float* rows_smem, int row_warp, int column_warp, int lane) {
  float highest[ROW_TILES][2], factor[ROW_TILES][2];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[m][half] = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < KEY_TILES; ++n)
        highest[m][half] = fmaxf(highest[m][half], fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
    }
  combine_rows<COLUMN_WARPS, BLOCK_M>(highest, rows_smem, row_warp, column_warp, lane,
                                      [](float a, float b) { return fmaxf(a, b); });
  bool grew = false;
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = state.shift[m][half], scaled = highest[m][half] * scale;
      if (scaled > before) state.shift[m][half] = RESCALE == Rescale::LAZY ? scaled + LAZY_OCTAVES : scaled;
      factor[m][half] = exp2_approx(before - state.shift[m][half]);
      grew |= scaled > before;
    }
  if (RESCALE == Rescale::ALWAYS || __any_sync(ALL_LANES, grew)) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) state.rescale(m, factor[m][0], factor[m][1]);
  }
}

// P = 2^(s · scale - shift) to shared memory, in pieces of PIECE_KEYS keys; sums += Σ P of this lane's keys.
template <typename Element, typename Layout, int BLOCK_M, int PIECE_KEYS, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void store_probabilities(RowState<ROW_TILES, DIM_TILES>& state,
                                                    const float (&s)[ROW_TILES][KEY_TILES][4], float scale,
                                                    unsigned char* p_smem,  // [keys / PIECE_KEYS, BLOCK_M, PIECE_KEYS]
                                                    int first_row, int first_key, int lane) {
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n) {
    const int key = first_key + n * 8;
    unsigned char* piece_smem = p_smem + key / PIECE_KEYS * (BLOCK_M * Layout::ROW_BYTES) + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = state.shift[m][half];
        const float even = exp2_approx(fmaf(s[m][n][2 * half], scale, -shift));
        const float odd = exp2_approx(fmaf(s[m][n][2 * half + 1], scale, -shift));
        state.sum[m][2 * half] += even + odd;
        const int row = first_row + m * 16 + half * 8 + lane / 4;
        *reinterpret_cast<uint32_t*>(piece_smem + Layout::offset(row, key % PIECE_KEYS / 8)) =
            pack2<Element>(even, odd);
      }
  }
}
