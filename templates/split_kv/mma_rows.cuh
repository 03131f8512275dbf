// mma_rows.cuh: attention of one warp's keys for 8 ROW_TILES query rows on tensor cores, transposed: Sᵀ = K Qᵀ and Oᵀ =
// Vᵀ Pᵀ, so that rows count in eights, not sixteens. Neither product cares in which order head_dim is summed or stored:
// a lane's operands are whole vectors of a row as they lie in memory. With g = lane / 4, t = lane % 4. SWIZZLED: key
// `place` of a tile is row `swizzled_row(place)`.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "split_kv/lane_pieces.cuh"
#include "device/merge/split_merge.cuh"

template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int ROWS, int KEYS, bool SWIZZLED> struct MmaRows {
  static constexpr int ROW_TILES = ROWS / 8, KEY_TILES = KEYS / 16, WIDTH = VECTOR_BYTES / 2, WORDS = VECTOR_BYTES / 4;
  static constexpr int K_VECTORS = WIDTH == 2 ? (HEAD_DIM + 15) / 16 * 2 : (HEAD_DIM + 4 * WIDTH - 1) / (4 * WIDTH);
  static constexpr int V_VECTORS = (HEAD_DIM + 8 * WIDTH - 1) / (8 * WIDTH);
  static constexpr int DIM_STEPS = K_VECTORS * WORDS / 2;  // k16 steps of K Qᵀ
  static constexpr int DIM_TILES = V_VECTORS * WORDS;      // m16 tiles of Vᵀ Pᵀ
  static_assert(ROWS == 8 * ROW_TILES && KEYS == 16 * KEY_TILES, "whole mma tiles");
  // Rows g, g + 8 of each tile.
  using K = LanePieces<Element, HEAD_DIM, VECTOR_BYTES, 2 * KEY_TILES, 8, false, K_VECTORS, 4 * WIDTH>;
  // 2t, 2t + 1, 2t + 8, 2t + 9.
  using V = LanePieces<Element, HEAD_DIM, VECTOR_BYTES, 4 * KEY_TILES, 0, true, V_VECTORS, 8 * WIDTH>;
  using Q = LanePieces<Element, HEAD_DIM, VECTOR_BYTES, 1, 0, false, K_VECTORS, 4 * WIDTH>;

  const int g, t;
  Q q[ROW_TILES];                                // B operand: row g of each tile
  float s[ROW_TILES][KEY_TILES][4];              // Sᵀ, then Pᵀ: key g: rows 2t, 2t + 1 | key g + 8: the same
  float o[ROW_TILES][DIM_TILES][4];              // element 2m of vector g: rows 2t, 2t + 1 | element 2m + 1: the same
  float shift[ROW_TILES][2], sum[ROW_TILES][2];  // rows 2t, 2t + 1; the sum is of this lane's keys

  __device__ __forceinline__ explicit MmaRows(int lane) : g(lane / 4), t(lane % 4) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      shift[r][0] = shift[r][1] = NO_KEY, sum[r][0] = sum[r][1] = 0.f;
#pragma unroll
      for (int m = 0; m < DIM_TILES; ++m) o[r][m][0] = o[r][m][1] = o[r][m][2] = o[r][m][3] = 0.f;
    }
  }
  __device__ __forceinline__ int k_row() const { return g; }
  __device__ __forceinline__ int k_column() const { return t * WIDTH; }
  __device__ __forceinline__ int v_row() const { return 2 * t; }
  __device__ __forceinline__ int v_column() const { return g * WIDTH; }

  // `row_gmem(row)` is where query row `row` of the tile begins, null if there is none.
  template <typename RowPointer> __device__ __forceinline__ void load_q(RowPointer row_gmem, float scale) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const Element* lane_gmem = row_gmem(r * 8 + g);
      const Element* first_gmem = lane_gmem + k_column();
      q[r].load([first_gmem](int) { return first_gmem; }, lane_gmem != nullptr, HEAD_DIM - k_column());
    }
  }

  // s = (Q Kᵀ)ᵀ · scale - shift, the exponent of P, with O and sums kept in step with a shift that is the highest score
  // so far. MASKED: keys from `limit(row)` on, and those before `hidden(row)`, counted from the tile's first, are not
  // seen. `row_terms(row, step)`: what `terms` do to the scores of a row from a key of the tile on.
  template <typename RowLimit, typename RowHidden, class Terms, typename TermsOfRow>
  __device__ __forceinline__ void scores(const K& k, float scale, bool masked, RowLimit limit, RowHidden hidden,
                                         const Terms& terms, TermsOfRow row_terms) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        s[r][n][0] = s[r][n][1] = s[r][n][2] = s[r][n][3] = 0.f;
#pragma unroll
        for (int d = 0; d < DIM_STEPS; ++d) {
          const int vector = 2 * d / WORDS, word = 2 * d % WORDS, next = (2 * d + 1) / WORDS,
                    next_word = (2 * d + 1) % WORDS;
          const uint32_t a[4] = {k.at[2 * n][vector][word], k.at[2 * n + 1][vector][word], k.at[2 * n][next][next_word],
                                 k.at[2 * n + 1][next][next_word]};
          mma_m16n8k16<Element>(s[r][n], a, q[r].at[0][vector][word], q[r].at[0][next][next_word]);
        }
      }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (Terms::ANY) {
          const auto row = row_terms(r * 8 + 2 * t + e, SWIZZLED ? swizzled_row(g) : g);
#pragma unroll
          for (int n = 0; n < KEY_TILES; ++n) {
            s[r][n][e] = terms.of(s[r][n][e], row, n * 16), s[r][n][e + 2] = terms.of(s[r][n][e + 2], row, n * 16 + 8);
          }
        }
        if (masked) {
          const int keys = limit(r * 8 + 2 * t + e) - (SWIZZLED ? swizzled_row(g) : g);
          if constexpr (Terms::WINDOW) {
            const int first = hidden(r * 8 + 2 * t + e) - (SWIZZLED ? swizzled_row(g) : g);
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) {
              if (n * 16 < first) s[r][n][e] = NEGATIVE_INFINITY;
              if (n * 16 + 8 < first) s[r][n][e + 2] = NEGATIVE_INFINITY;
            }
          }
#pragma unroll
          for (int n = 0; n < KEY_TILES; ++n) {
            if (n * 16 >= keys) s[r][n][e] = NEGATIVE_INFINITY;
            if (n * 16 + 8 >= keys) s[r][n][e + 2] = NEGATIVE_INFINITY;
          }
        }
        float highest = fmaxf(s[r][0][e], s[r][0][e + 2]);
#pragma unroll
        for (int n = 1; n < KEY_TILES; ++n) highest = fmaxf(highest, fmaxf(s[r][n][e], s[r][n][e + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
        const float before = shift[r][e];
        shift[r][e] = fmaxf(before, highest * scale);
        const float factor = exp2_approx(before - shift[r][e]);
        sum[r][e] *= factor;
#pragma unroll
        for (int m = 0; m < DIM_TILES; ++m) o[r][m][e] *= factor, o[r][m][e + 2] *= factor;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
          s[r][n][e] = exp2_approx(fmaf(s[r][n][e], scale, -shift[r][e]));
          s[r][n][e + 2] = exp2_approx(fmaf(s[r][n][e + 2], scale, -shift[r][e]));
          sum[r][e] += s[r][n][e] + s[r][n][e + 2];
        }
      }
  }

  // Keys 2t and 2t + 1 of row g, out of lanes that hold two rows of one key each: an 8x8 transpose.
  __device__ __forceinline__ uint32_t transposed(uint32_t two_rows) const {
    const uint32_t even = __shfl_sync(ALL_LANES, two_rows, 8 * t + g / 2),
                   odd = __shfl_sync(ALL_LANES, two_rows, 8 * t + 4 + g / 2);
    return __byte_perm(even, odd, g % 2 ? 0x7632 : 0x5410);
  }

  // Oᵀ += Vᵀ Pᵀ.
  __device__ __forceinline__ void accumulate(const V& v) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      uint32_t p[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        p[r][0] = transposed(pack2<Element>(s[r][n][0], s[r][n][1]));
        p[r][1] = transposed(pack2<Element>(s[r][n][2], s[r][n][3]));
      }
#pragma unroll
      for (int m = 0; m < DIM_TILES; ++m) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = v.at[4 * n + i][m / WORDS][m % WORDS];
        const uint32_t a[4] = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                               __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632)};
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) mma_m16n8k16<Element>(o[r][m], a, p[r][0], p[r][1]);
      }
    }
  }

  // This warp's result as source `source` of a merge.
  template <typename Buffer> __device__ __forceinline__ void put(const Buffer& buffer, int source) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = r * 8 + 2 * t + e;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[r][e] += __shfl_xor_sync(ALL_LANES, sum[r][e], step);
        if (g == 0) *buffer.state(source, row) = make_float2(shift[r][e], sum[r][e]);
#pragma unroll
        for (int v = 0; v < V_VECTORS; ++v) {
          const int column = (v * 8 + g) * WIDTH;
          if (V_VECTORS * 8 * WIDTH != HEAD_DIM && column >= HEAD_DIM) continue;
#pragma unroll
          for (int m = v * WORDS; m < (v + 1) * WORDS; m += WORDS == 1 ? 1 : 2) {
            float* place = buffer.place(source, row, column + 2 * (m - v * WORDS));
            if constexpr (WORDS == 1) *reinterpret_cast<float2*>(place) = make_float2(o[r][m][e], o[r][m][e + 2]);
            else
              *reinterpret_cast<float4*>(place) =
                  make_float4(o[r][m][e], o[r][m][e + 2], o[r][m + 1][e], o[r][m + 1][e + 2]);
          }
        }
      }
  }
};
