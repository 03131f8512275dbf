// flash_output.cuh: a warp's part of O to its end: merged over the warps that split the keys, divided by the row sums,
// stored.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"
#include "device/mma/flash_fragments.cuh"
#include "device/softmax/log_sum.cuh"

// Floats that a lane hands over in a merge: O, two shifts and two sums of each row tile.
constexpr __host__ __device__ int merge_floats(int row_tiles, int dim_tiles) { return row_tiles * (4 * dim_tiles + 4); }

// A lane's part of a result to a place of its own: pieces of 16 bytes, 32 apart, O first.
template <int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void leave_result(const RowState<ROW_TILES, DIM_TILES>& state, float4* place) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n) {
      place[(m * DIM_TILES + n) * 32] =
          make_float4(state.o[m][n][0], state.o[m][n][1], state.o[m][n][2], state.o[m][n][3]);
    }
    place[(ROW_TILES * DIM_TILES + m) * 32] =
        make_float4(state.shift[m][0], state.shift[m][1], state.sum[m][0], state.sum[m][2]);
  }
}

// A result for other keys of the same rows, of which `piece(i)` is piece i, to that of this lane: O = Σ_r 2^(shift_r -
// shift) O_r with shift = max_r shift_r, sums alike.
template <int ROW_TILES, int DIM_TILES, typename Piece>
__device__ __forceinline__ void add_result(RowState<ROW_TILES, DIM_TILES>& state, Piece piece) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    const float4 rows = piece(ROW_TILES * DIM_TILES + m);
    const float shift_low = fmaxf(state.shift[m][0], rows.x), shift_high = fmaxf(state.shift[m][1], rows.y);
    state.rescale(m, exp2_approx(state.shift[m][0] - shift_low), exp2_approx(state.shift[m][1] - shift_high));
    const float low = exp2_approx(rows.x - shift_low), high = exp2_approx(rows.y - shift_high);
    state.shift[m][0] = shift_low, state.shift[m][1] = shift_high;
    state.sum[m][0] = fmaf(rows.z, low, state.sum[m][0]), state.sum[m][2] = fmaf(rows.w, high, state.sum[m][2]);
#pragma unroll
    for (int n = 0; n < DIM_TILES; ++n) {
      const float4 o = piece(m * DIM_TILES + n);
      state.o[m][n][0] = fmaf(o.x, low, state.o[m][n][0]), state.o[m][n][1] = fmaf(o.y, low, state.o[m][n][1]);
      state.o[m][n][2] = fmaf(o.z, high, state.o[m][n][2]), state.o[m][n][3] = fmaf(o.w, high, state.o[m][n][3]);
    }
  }
}

// Partial results of the key warps of the same rows into the first of them.
template <int WARPS, int KEY_WARPS, int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void merge_key_warps(
    RowState<ROW_TILES, DIM_TILES>& state,
    float4* merge_smem,  // [KEY_WARPS - 1, WARPS, merge_floats / 4, 32 lanes]
    int row_warp, int key_warp, int lane) {
  constexpr int WARP_VECTORS = merge_floats(ROW_TILES, DIM_TILES) / 4 * 32;
  merge_smem += row_warp * WARP_VECTORS + lane;
  __syncthreads();  // all warps are done with the rings, which the partial results overwrite
  if (key_warp > 0) leave_result(state, merge_smem + (key_warp - 1) * WARPS * WARP_VECTORS);
  __syncthreads();  // the partial results are visible to the first key warp
  if (key_warp > 0) return;
#pragma unroll
  for (int w = 0; w < KEY_WARPS - 1; ++w)
    add_result(state, [&](int i) { return merge_smem[w * WARPS * WARP_VECTORS + i * 32]; });
}

// The terms of a kernel that computes plain attention alone.
struct NoSink {
  static constexpr bool SINK = false;
};

// The log-sum-exps of the warp's rows, of which the first `valid_rows` exist, to global memory. SUM_BY_MMA as in
// `store_output`, before which this is.
template <bool SUM_BY_MMA, class Terms, int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void store_log_sums(const RowState<ROW_TILES, DIM_TILES>& state, const Terms& terms,
                                               int head, float* lse_gmem, int valid_rows, int lane) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float shift = state.shift[m][half], sum = state.sum[m][2 * half];
      if constexpr (!SUM_BY_MMA) {
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      }
      if constexpr (Terms::SINK) terms.add_sink(shift, sum, head);
      const int row = m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && row < valid_rows) lse_gmem[row] = log_sum(shift, sum);
    }
}

// O / sums to global memory; a row that saw no key has sum 0 and becomes 0. THROUGH_SHARED: in 16-byte stores, by way
// of the warp's own rows of `o_smem`; otherwise 4 bytes per lane, as the fragments lie. SUM_BY_MMA: the sums are those
// of all four lanes of a row already. FOURS: a lane has four neighbouring columns of 16 (`in_order` of
// eight_bit_fragments.cuh).
template <typename Layout, bool THROUGH_SHARED, bool SUM_BY_MMA, bool FOURS = false, class Terms, typename Element,
          int ROW_TILES, int DIM_TILES>
__device__ __forceinline__ void store_output(
    RowState<ROW_TILES, DIM_TILES>& state, const Terms& terms, int head,
    unsigned char* o_smem,  // [16 ROW_TILES, head_dim] of this warp
    Element* o_gmem,        // [valid_rows, head_dim], rows `row_stride` elements apart
    int64_t row_stride, int valid_rows, int lane) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][2 * half];
      if constexpr (!SUM_BY_MMA) {
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      }
      float inverse;
      if constexpr (Terms::SINK) {
        const float factor = terms.add_sink(state.shift[m][half], sum, head);
        inverse = sum > 0.f ? __fdividef(factor, sum) : 0.f;
      } else {
        inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
      }
      const int row = m * 16 + half * 8 + lane / 4;
      Element* lane_gmem = o_gmem + row * row_stride + lane % 4 * (FOURS ? 4 : 2);
#pragma unroll
      for (int n = 0; n < DIM_TILES; ++n) {
        const uint32_t pair = pack2<Element>(state.o[m][n][2 * half] * inverse, state.o[m][n][2 * half + 1] * inverse);
        if constexpr (THROUGH_SHARED) {
          const int chunk = FOURS ? n / 2 * 2 + lane % 4 / 2 : n, word = FOURS ? lane % 2 * 2 + n % 2 : lane % 4;
          *reinterpret_cast<uint32_t*>(o_smem + Layout::offset(row, chunk) + word * 4) = pair;
        } else {
          if (row < valid_rows)
            *reinterpret_cast<uint32_t*>(lane_gmem + (FOURS ? n / 2 * 16 + n % 2 * 2 : n * 8)) = pair;
        }
      }
    }
  if constexpr (THROUGH_SHARED) {
    __syncwarp();  // the warp's rows are whole: each lane now reads what others wrote
#pragma unroll
    for (int i = lane; i < 16 * ROW_TILES * DIM_TILES; i += 32) {
      const int row = i / DIM_TILES, chunk = i % DIM_TILES;
      if (row < valid_rows) {
        *reinterpret_cast<uint4*>(o_gmem + row * row_stride + chunk * 8) =
            *reinterpret_cast<uint4*>(o_smem + Layout::offset(row, chunk));
      }
    }
  }
}
