// flash_fragments.cuh: what a warp keeps of its rows, and its weights and P V of a tile of keys, in mma fragments.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/mma/products.cuh"

// What a warp carries from one tile of keys to the next.
template <int ROW_TILES, int DIM_TILES> struct RowState {
  float o[ROW_TILES][DIM_TILES][4];  // Σ_j 2^(s_j - shift) · V_j
  float shift[ROW_TILES][2];         // log2 units, rows g and g + 8: the row maximum so far, or above it
  float sum[ROW_TILES][4];           // Σ_j 2^(s_j - shift) in [0] and [2]: of this lane's keys, or by mma of all keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < DIM_TILES; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
      shift[m][0] = shift[m][1] = -1e38f;  // no key seen: finite, so that a masked score minus it is -inf and no NaN
      sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
    }
  }
  // To higher shifts: `low`, `high` = 2^(old shift - new shift) of rows g and g + 8.
  __device__ __forceinline__ void rescale(int m, float low, float high) {
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n) o[m][n][0] *= low, o[m][n][1] *= low, o[m][n][2] *= high, o[m][n][3] *= high;
    // By no instruction that adds, too: sums would have other bits where others than these rows ask for a rescale.
    sum[m][0] = __fmul_rn(sum[m][0], low), sum[m][1] = __fmul_rn(sum[m][1], low);
    sum[m][2] = __fmul_rn(sum[m][2], high), sum[m][3] = __fmul_rn(sum[m][3], high);
  }
};

// P = 2^s, sums += Σ P, O += P V, 16 keys at a time. SUM_BY_MMA: sums += P · 1 on the tensor cores.
template <typename Element, typename Layout, bool SUM_BY_MMA, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void multiply_pv(RowState<ROW_TILES, DIM_TILES>& state,
                                            const float (&s)[ROW_TILES][KEY_TILES][4],
                                            uint32_t v_smem) {  // [8 KEY_TILES, head_dim], rows_first
#pragma unroll
  for (int n = 0; n < KEY_TILES; n += 2) {
    uint32_t p[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      float pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows g, g + 8 of keys 0-7, then of keys 8-15: S as it stands is the A operand
        const float even = exp2_approx(s[m][n + i / 2][i % 2 * 2]), odd = exp2_approx(s[m][n + i / 2][i % 2 * 2 + 1]);
        p[m][i] = pack2<Element>(even, odd);
        pair[i] = even + odd;
      }
      if constexpr (!SUM_BY_MMA) state.sum[m][0] += pair[0] + pair[2], state.sum[m][2] += pair[1] + pair[3];
      if constexpr (SUM_BY_MMA)
        mma_m16n8k16<Element>(state.sum[m], p[m], pack2<Element>(1.f, 1.f), pack2<Element>(1.f, 1.f));
    }
    add_product<Element, Layout, 1>(state.o, p, v_smem, n / 2);
  }
}
