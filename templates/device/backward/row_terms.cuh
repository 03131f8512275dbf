// row_terms.cuh: what the backward pass needs of each query beside the tensors: log2 of its sum of exponentials, and
// delta = Σ dO · O - dlse, by which dS = P · (dO Vᵀ - delta).
#include "device/ptx/element.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"

// Of the rows of a tile, ROWS floats each. A row that sees no key, or is none of `rows`, gets +inf and 0: all of its
// probabilities are 0 then. LANES neighbouring threads share a row.
template <typename Element, int ROWS, int DIM, int THREADS> struct RowDeltas {
  static constexpr int WIDTH = 16 / sizeof(Element), PIECES = DIM / WIDTH;  // of 16 bytes, a row
  static constexpr int LANES = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4;
  static_assert(ROWS % (32 / LANES) == 0, "whole warps");

  // Pointers are to the tile's first row; `dlse_gmem` may be null.
  static __device__ __forceinline__ void write(float* log_sums_gmem, float* deltas_gmem, const Element* o_gmem,
                                               int64_t o_row_stride, const Element* do_gmem, int64_t do_row_stride,
                                               const float* lse_gmem, const float* dlse_gmem, int rows) {
    constexpr float LOG2_E = 1.44269504088896340736f;
    const int lane = threadIdx.x % LANES;
    for (int row = threadIdx.x / LANES; row < ROWS; row += THREADS / LANES) {
      float delta = 0.f;
      if (row < rows) {
        for (int piece = lane; piece < PIECES; piece += LANES) {
          float o[WIDTH], d[WIDTH];
          to_floats(load_vector<WIDTH>(o_gmem + row * o_row_stride + piece * WIDTH), o);
          to_floats(load_vector<WIDTH>(do_gmem + row * do_row_stride + piece * WIDTH), d);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) delta = fmaf(o[i], d[i], delta);
        }
      }
#pragma unroll
      for (int away = LANES / 2; away > 0; away /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, away);
      if (lane == 0) {
        float log_sum = -NEGATIVE_INFINITY;
        if (row < rows) {
          if (lse_gmem[row] != NEGATIVE_INFINITY) log_sum = lse_gmem[row] * LOG2_E;
          if (dlse_gmem) delta -= dlse_gmem[row];
        }
        log_sums_gmem[row] = log_sum;
        deltas_gmem[row] = delta;
      }
    }
  }
};
