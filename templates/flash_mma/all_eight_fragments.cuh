// all_eight_fragments.cuh: the products of attention over Q, K and V of 8 bits, which tensor cores multiply as they
// are. Of int8 that is Q Kᵀ alone, whose sums are whole numbers. Of e4m3 they keep fewer bits of a sum than fp32 has:
// P V of a tile of keys is added to O apart.
#include "device/ptx/element.cuh"
#include "device/ptx/byte_permute.cuh"
#include "device/ptx/e4m3.cuh"
#include "device/ptx/eight_bits.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k32.cuh"
#include "device/mma/flash_fragments.cuh"

constexpr float WEIGHT_UNIT = 256.f;  // the greatest weight of a row as e4m3, whose range ends at 448

// Q as mma's A operand: rows g and g + 8, elements 4t to 4t + 3 of a step of 32, then 16 further on.
template <typename QueryElement, int ROW_TILES, int DIM_STEPS>
__device__ __forceinline__ void load_eight_bits(uint32_t (&q)[ROW_TILES][DIM_STEPS][4],
                                                const QueryElement* lane_gmem,         // row g, element 4t
                                                int64_t row_stride, int valid_rows) {  // from row g on
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int d = 0; d < DIM_STEPS; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m * 16 + i % 2 * 8;
        const QueryElement* from = lane_gmem + row * row_stride + d * 32 + i / 2 * 16;
        q[m][d][i] = row < valid_rows ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
}

template <> struct Mma<E4m3> {
  using Sum = float;
  static __device__ __forceinline__ void add(Sum (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k32(c, a, b0, b1);
  }
};
template <> struct Mma<Int8> {
  using Sum = int;
  static __device__ __forceinline__ void add(Sum (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k32(c, a, b0, b1);
  }
};

// S = Q Kᵀ.
template <typename Element, typename Layout, int ROW_TILES, int KEY_TILES, int DIM_STEPS>
__device__ __forceinline__ void multiply_qk_all_eight(float (&s)[ROW_TILES][KEY_TILES][4],
                                                      const uint32_t (&q)[ROW_TILES][DIM_STEPS][4],
                                                      uint32_t k_smem) {  // [8 KEY_TILES, head_dim], chunks_first
  typename Mma<Element>::Sum sums[ROW_TILES][KEY_TILES][4];
  multiply_rows<Element, Layout, DIM_STEPS>(sums, KeptRows<ROW_TILES, DIM_STEPS>{q}, k_smem);
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = float(sums[m][n][e]);  // below 2^24
}

// P = 2^s, sums += Σ P, O += P V · WEIGHT_UNIT. Of every 16 keys four of a lane's scores are a register of the A
// operand: place 4t + e has key 2t + e % 2 + e / 2 · 8, in V too. Of O tile 2c has the even columns of 16 from 16c on,
// tile 2c + 1 the odd ones (`in_order`).
template <typename Layout, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void multiply_pv_all_eight(RowState<ROW_TILES, DIM_TILES>& state,
                                                      const float (&s)[ROW_TILES][KEY_TILES][4],
                                                      uint32_t v_smem) {  // [8 KEY_TILES, head_dim], rows_first
  static_assert(DIM_TILES % 4 == 0 && KEY_TILES % 4 == 0, "ldmatrix takes two chunks of 16 elements");
  constexpr int KEY_STEPS = KEY_TILES / 4;
  uint32_t p[KEY_STEPS][ROW_TILES][4];
#pragma unroll
  for (int step = 0; step < KEY_STEPS; ++step)
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows g, g + 8 of the first 16 keys, then of the others
        float weights[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[e] = exp2_approx(s[m][4 * step + i / 2 * 2 + e / 2][i % 2 * 2 + e % 2]);
        state.sum[m][i % 2 * 2] += (weights[0] + weights[1]) + (weights[2] + weights[3]);
        p[step][m][i] = pack4_e4m3(weights[0] * WEIGHT_UNIT, weights[1] * WEIGHT_UNIT, weights[2] * WEIGHT_UNIT,
                                   weights[3] * WEIGHT_UNIT);
      }
#pragma unroll
  for (int d = 0; d < DIM_TILES / 4; ++d) {
    float added[ROW_TILES][4][4] = {};
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
      uint32_t v[2][4];  // transposed: keys 0-7, 8-15 of elements 0-15, then of elements 16-31
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ldmatrix_x4_trans(v[half], Layout::block_address(v_smem, 2 * step + half, d));
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // columns 2g of 16, then 2g + 1
        const uint32_t of = n % 2 ? 0x7531 : 0x6420;
        const uint32_t low = byte_permute(v[0][n / 2 * 2], v[0][n / 2 * 2 + 1], of),
                       high = byte_permute(v[1][n / 2 * 2], v[1][n / 2 * 2 + 1], of);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) mma_m16n8k32(added[m][n], p[step][m], low, high);
      }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.o[m][4 * d + n][e] += added[m][n][e];
  }
}
