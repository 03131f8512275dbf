// row_terms.cuh: what the backward pass needs of each query beside the tensors: log2 of its sum of exponentials, and
// delta = Σ dO · O - dlse, by which dS = P · (dO Vᵀ - delta).
#include "device/ptx/element.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"

// Of the rows of a tile, ROWS floats each. A row that sees no key, or is none of `rows`, gets +inf and 0: all of its
// probabilities are 0 then. LANES neighbouring threads share a row. FOR_WGMMA: of sixteen rows, those that lane 4 g + t
// has of Sᵀ in wgmma's accumulators lie side by side: 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
template <typename Element, int ROWS, int DIM, int THREADS, bool FOR_WGMMA = false> struct RowDeltas {
  static constexpr int WIDTH = 16 / sizeof(Element), PIECES = DIM / WIDTH;  // of 16 bytes, a row
  static constexpr int LANES = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4;
  static constexpr int ROWS_AT_ONCE = THREADS / LANES;
  static_assert(ROWS % (32 / LANES) == 0, "whole warps");

  // Pointers are to the tile's first row; `dlse_gmem` may be null.
  static __device__ __forceinline__ void write(float* log_sums_gmem, float* deltas_gmem, const Element* o_gmem,
                                               int64_t o_row_stride, const Element* do_gmem, int64_t do_row_stride,
                                               const float* lse_gmem, const float* dlse_gmem, int rows,
                                               int thread = threadIdx.x) {
    constexpr float LOG2_E = 1.44269504088896340736f;
    const int lane = thread % LANES, first = thread / LANES;
    const Element* o_piece = o_gmem + first * o_row_stride + lane * WIDTH;
    const Element* do_piece = do_gmem + first * do_row_stride + lane * WIDTH;
#pragma unroll 1
    for (int row = first; row < ROWS; row += ROWS_AT_ONCE) {
      float delta = 0.f, lse = NEGATIVE_INFINITY, dlse = 0.f;  // of `lane` 0
      if (row < rows) {
        if (lane == 0) lse = lse_gmem[row], dlse = dlse_gmem ? dlse_gmem[row] : 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; i += LANES) {
          if (PIECES % LANES > 0 && i + lane >= PIECES) break;
          float o[WIDTH], d[WIDTH];
          to_floats(load_vector<WIDTH>(o_piece + i * WIDTH), o);
          to_floats(load_vector<WIDTH>(do_piece + i * WIDTH), d);
#pragma unroll
          for (int e = 0; e < WIDTH; ++e) delta = fmaf(o[e], d[e], delta);
        }
      }
      o_piece += ROWS_AT_ONCE * o_row_stride, do_piece += ROWS_AT_ONCE * do_row_stride;
#pragma unroll
      for (int away = LANES / 2; away > 0; away /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, away);
      if (lane == 0) {
        const int place = FOR_WGMMA ? row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2 : row;
        log_sums_gmem[place] = lse == NEGATIVE_INFINITY ? -NEGATIVE_INFINITY : lse * LOG2_E;
        deltas_gmem[place] = delta - dlse;
      }
    }
  }
};
