// eight_bit_fragments.cuh: the two products of attention over K and V of 8 bits, which become fp16 on their way from
// shared memory to mma fragments. A lane's word of a row holds four neighbouring elements; head_dim is summed up in the
// order that makes them two pairs of a k16 step, and O's columns come out so (`in_order`).
#include "device/ptx/element.cuh"
#include "device/ptx/eight_bits.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"
#include "device/mma/flash_fragments.cuh"

// Pairs of Q as mma's A operand: rows g and g + 8, elements 4t, 4t + 1 of a step of 16, then 4t + 2, 4t + 3.
// In fp16: a row of bf16 is multiplied by a power of two that brings its largest element to 2^14, so that what fp16
// cannot hold of it is less than 2^-38 of that one. `unit`: what scores of rows g and g + 8 are to be multiplied by.
template <typename Element, int ROW_TILES, int DIM_STEPS>
__device__ __forceinline__ void load_queries(uint32_t (&q)[ROW_TILES][DIM_STEPS][4], float (&unit)[ROW_TILES][2],
                                             const Element* lane_gmem,              // row g, element 4t
                                             int64_t row_stride, int valid_rows) {  // from row g on
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8;
      float largest = 0.f;
#pragma unroll
      for (int d = 0; d < DIM_STEPS; ++d) {
        uint2 words = make_uint2(0, 0);
        if (row < valid_rows) words = *reinterpret_cast<const uint2*>(lane_gmem + row * row_stride + d * 16);
        q[m][d][half] = words.x, q[m][d][2 + half] = words.y;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float low, high;
          unpack2(q[m][d][2 * i + half], Element{}, low, high);
          largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
        }
      }
      unit[m][half] = 1.f;
      if constexpr (!SameType<Element, Fp16>::VALUE) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        const PowerOfTwo power(largest);
        unit[m][half] = power.inverse;
#pragma unroll
        for (int d = 0; d < DIM_STEPS; ++d)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float low, high;
            unpack2(q[m][d][2 * i + half], Element{}, low, high);
            q[m][d][2 * i + half] = pack2<Fp16>(low * power.factor, high * power.factor);
          }
      }
    }
}

// S = Q Kᵀ.
template <typename KvElement, typename Layout, int ROW_TILES, int KEY_TILES, int DIM_STEPS>
__device__ __forceinline__ void multiply_qk_eight(float (&s)[ROW_TILES][KEY_TILES][4],
                                                  const uint32_t (&q)[ROW_TILES][DIM_STEPS][4],
                                                  uint32_t k_smem) {  // [8 KEY_TILES, head_dim], chunks_first
  static_assert(DIM_STEPS % 2 == 0, "ldmatrix takes two chunks of 16 elements");
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
#pragma unroll
  for (int d = 0; d < DIM_STEPS; d += 2)
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2) {
      uint32_t k[4];  // elements 0-15, 16-31 of keys 0-7, then of keys 8-15
      ldmatrix_x4(k, Layout::block_address(k_smem, n / 2, d / 2));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t low[2], high[2];
        to_halves<KvElement>(k[step], low[0], high[0]);
        to_halves<KvElement>(k[2 + step], low[1], high[1]);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          mma_m16n8k16<Fp16>(s[m][n], q[m][d + step], low[0], high[0]);
          mma_m16n8k16<Fp16>(s[m][n + 1], q[m][d + step], low[1], high[1]);
        }
      }
    }
}

// P = 2^s, sums += Σ P, O += P V, 16 keys at a time. Of O tile 2c has the even columns of 16 from 16c on, tile 2c + 1
// the odd ones. `summed(p, n, e)` is what key 8n + 2t + e of a row adds to its sum.
template <typename KvElement, typename Layout, bool SUM_BY_MMA, int ROW_TILES, int KEY_TILES, int DIM_TILES,
          typename Summed>
__device__ __forceinline__ void multiply_pv_eight(RowState<ROW_TILES, DIM_TILES>& state,
                                                  const float (&s)[ROW_TILES][KEY_TILES][4],
                                                  uint32_t v_smem,  // [8 KEY_TILES, head_dim], rows_first
                                                  Summed summed) {
  static_assert(DIM_TILES % 4 == 0, "ldmatrix takes two chunks of 16 elements");
#pragma unroll
  for (int n = 0; n < KEY_TILES; n += 2) {
    uint32_t p[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows g, g + 8 of keys 0-7, then of keys 8-15
        const float even = exp2_approx(s[m][n + i / 2][i % 2 * 2]), odd = exp2_approx(s[m][n + i / 2][i % 2 * 2 + 1]);
        p[m][i] = pack2<Fp16>(even, odd);
        if constexpr (!SUM_BY_MMA) state.sum[m][i % 2 * 2] += summed(even, n + i / 2, 0) + summed(odd, n + i / 2, 1);
      }
      if constexpr (SUM_BY_MMA) mma_m16n8k16<Fp16>(state.sum[m], p[m], pack2<Fp16>(1.f, 1.f), pack2<Fp16>(1.f, 1.f));
    }
#pragma unroll
    for (int d = 0; d < DIM_TILES / 4; ++d) {
      uint32_t v[4];  // transposed: keys 0-7, 8-15 of elements 0-15, then of elements 16-31
      ldmatrix_x4_trans(v, Layout::block_address(v_smem, n / 2, d));
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        uint32_t even[2], odd[2];  // two keys of element 2g, of element 2g + 1
#pragma unroll
        for (int i = 0; i < 2; ++i) to_halves<KvElement>(__byte_perm(v[2 * chunk + i], 0, 0x3120), even[i], odd[i]);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          mma_m16n8k16<Fp16>(state.o[m][4 * d + 2 * chunk], p[m], even[0], even[1]);
          mma_m16n8k16<Fp16>(state.o[m][4 * d + 2 * chunk + 1], p[m], odd[0], odd[1]);
        }
      }
    }
  }
}

// O times `factor`, its pairs neighbouring columns: of tile n 16 (n / 2) + 4t + 2 (n % 2) and the next.
template <int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void in_order(RowState<ROW_TILES, DIM_TILES>& state, float factor) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < DIM_TILES; n += 2) {
      float even[4], odd[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) even[e] = state.o[m][n][e] * factor, odd[e] = state.o[m][n + 1][e] * factor;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.o[m][n][2 * half] = even[2 * half], state.o[m][n][2 * half + 1] = odd[2 * half];
        state.o[m][n + 1][2 * half] = even[2 * half + 1], state.o[m][n + 1][2 * half + 1] = odd[2 * half + 1];
      }
    }
}
