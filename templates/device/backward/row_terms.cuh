// row_terms.cuh: what the backward pass needs of each query beside the tensors: log2 of its sum of exponentials, and
// delta = Σ dO · O - dlse, by which dS = P · (dO Vᵀ - delta).
#include "device/ptx/element.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"

// Of the rows of a tile, ROWS floats each. A row that sees no key, or is none of `rows`, gets +inf and 0: all of its
// probabilities are 0 then. LANES neighbouring threads share a row. FOR_WGMMA: of sixteen rows, those that lane 4 g + t
// has of Sᵀ in wgmma's accumulators lie side by side: 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A thread has AT_ONCE rows on
// their way.
template <typename Element, int ROWS, int DIM, int THREADS, bool FOR_WGMMA = false, int AT_ONCE = 1> struct RowDeltas {
  static constexpr int WIDTH = 16 / sizeof(Element), PIECES = DIM / WIDTH;  // of 16 bytes, a row
  static constexpr int LANES = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4;
  static constexpr int ROWS_BESIDE = THREADS / LANES;
  static_assert(ROWS % (32 / LANES) == 0, "whole warps");

  // Of a tile without rows, of which there are some among packed sequences.
  static __device__ __forceinline__ void write_none(float* log_sums_gmem, float* deltas_gmem,
                                                    int thread = threadIdx.x) {
    for (int i = thread; i < ROWS; i += THREADS) log_sums_gmem[i] = -NEGATIVE_INFINITY, deltas_gmem[i] = 0.f;
  }
  // Pointers are to the tile's first row, of which there is one at least; `dlse_gmem` may be null. `all`: of the tile,
  // where that is not ROWS.
  static __device__ __forceinline__ void write(float* log_sums_gmem, float* deltas_gmem, const Element* o_gmem,
                                               int64_t o_row_stride, const Element* do_gmem, int64_t do_row_stride,
                                               const float* lse_gmem, const float* dlse_gmem, int rows,
                                               int thread = threadIdx.x, int all = ROWS) {
    constexpr float LOG2_E = 1.44269504088896340736f;
    const int lane = thread % LANES;
#pragma unroll 1
    for (int first = thread / LANES; first < all; first += ROWS_BESIDE * AT_ONCE) {
      float delta[AT_ONCE], lse[AT_ONCE], dlse[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        const int row = min(first + n * ROWS_BESIDE, rows - 1);  // the last one in place of those behind it
        delta[n] = 0.f, lse[n] = lse_gmem[row], dlse[n] = dlse_gmem ? dlse_gmem[row] : 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; i += LANES) {
          if (PIECES % LANES > 0 && i + lane >= PIECES) break;
          float o[WIDTH], d[WIDTH];
          to_floats(load_vector<WIDTH>(o_gmem + row * o_row_stride + (i + lane) * WIDTH), o);
          to_floats(load_vector<WIDTH>(do_gmem + row * do_row_stride + (i + lane) * WIDTH), d);
#pragma unroll
          for (int e = 0; e < WIDTH; ++e) delta[n] = fmaf(o[e], d[e], delta[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        const int row = first + n * ROWS_BESIDE;
#pragma unroll
        for (int away = LANES / 2; away > 0; away /= 2) delta[n] += __shfl_xor_sync(ALL_LANES, delta[n], away);
        if (lane == 0 && row < all) {
          const bool sees = row < rows && lse[n] != NEGATIVE_INFINITY;
          const int place = FOR_WGMMA ? row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2 : row;
          log_sums_gmem[place] = sees ? lse[n] * LOG2_E : -NEGATIVE_INFINITY;
          deltas_gmem[place] = row < rows ? delta[n] - dlse[n] : 0.f;
        }
      }
    }
  }
};
