// shared_weights.cuh: P V by warps that share the columns of V. Each warp computes the weights P of its own rows and
// lays them into shared memory; then it takes those of all rows of its VALUE_WARPS warps, for its part of the columns.
// So a row of V is read from shared memory once for all these rows. That counts where O of 16 rows fills the registers.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/swizzle.cuh"
#include "device/mma/flash_fragments.cuh"
#include "device/softmax/online_softmax.cuh"

// P = 2^s, sums += Σ P.
template <typename Element, typename Layout, bool SUM_BY_MMA, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void lay_weights(RowState<ROW_TILES, DIM_TILES>& state,
                                            const float (&s)[ROW_TILES][KEY_TILES][4],
                                            unsigned char* p_smem,  // [16 ROW_TILES, 8 KEY_TILES] of this warp
                                            int lane) {
#pragma unroll
  for (int n = 0; n < KEY_TILES; n += 2) {
    uint32_t p[ROW_TILES][4];
    weigh_keys<Element, SUM_BY_MMA>(state, p, s, n);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m * 16 + i % 2 * 8 + lane / 4;
        *reinterpret_cast<uint32_t*>(p_smem + Layout::offset(row, n + i / 2) + lane % 4 * 4) = p[m][i];
      }
  }
}

// What each row's O and sum were multiplied by since its shift was `old_shift`.
template <int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void lay_factors(const RowState<ROW_TILES, DIM_TILES>& state,
                                            const float (&old_shift)[ROW_TILES][2],
                                            float2* rows_smem,  // [16 ROW_TILES] of this warp
                                            int lane) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = exp2_approx(old_shift[m][half] - state.shift[m][half]);
      if (lane % 4 == 0) rows_smem[m * 16 + half * 8 + lane / 4].x = factor;
    }
}

// O to the rows' new shifts, then O += P V.
template <typename Element, typename WeightLayout, typename ValueLayout, Rescale RESCALE, int KEY_TILES, int ROW_TILES,
          int DIM_TILES>
__device__ __forceinline__ void multiply_laid(RowState<ROW_TILES, DIM_TILES>& values,
                                              uint32_t p_smem,          // [16 ROW_TILES, 8 KEY_TILES], rows_first
                                              const float2* rows_smem,  // [16 ROW_TILES]
                                              uint32_t v_smem,          // [8 KEY_TILES, *], rows_first
                                              int lane) {
  float factor[ROW_TILES][2];
  bool changed = false;
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[m][half] = rows_smem[m * 16 + half * 8 + lane / 4].x;
      changed |= factor[m][half] != 1.f;
    }
  if (RESCALE == Rescale::ALWAYS || __any_sync(ALL_LANES, changed)) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) values.rescale(m, factor[m][0], factor[m][1]);
  }
#pragma unroll
  for (int step = 0; step < KEY_TILES / 2; ++step) {
    uint32_t p[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) ldmatrix_x4(p[m], WeightLayout::block_address(p_smem, m, step));
    accumulate_values<Element, ValueLayout>(values, p, v_smem, step);
  }
}

// Each row's shift and whole sum to the warps that have its O.
template <bool SUM_BY_MMA, int OWN_TILES, int OWN_DIM_TILES, int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void share_sums(const RowState<OWN_TILES, OWN_DIM_TILES>& state,
                                           float2* own_rows_smem,  // [16 OWN_TILES] of this warp
                                           RowState<ROW_TILES, DIM_TILES>& values,
                                           const float2* rows_smem,  // [16 ROW_TILES]
                                           int lane) {
  __syncthreads();  // no warp still reads factors, weights or a tile of V
#pragma unroll
  for (int m = 0; m < OWN_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][2 * half];
      if constexpr (!SUM_BY_MMA) {
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      }
      if (lane % 4 == 0) own_rows_smem[m * 16 + half * 8 + lane / 4] = make_float2(state.shift[m][half], sum);
    }
  __syncthreads();  // the shifts and sums of all rows are visible
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 row = rows_smem[m * 16 + half * 8 + lane / 4];
      values.shift[m][half] = row.x, values.sum[m][2 * half] = row.y;
    }
}
