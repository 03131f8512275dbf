// mma_rows.cuh: attention of one warp's keys for 8 ROW_TILES query rows on tensor cores, transposed: Sᵀ = K Qᵀ and Oᵀ =
// Vᵀ Pᵀ, so that rows count in eights, not sixteens. Neither product cares in which order head_dim is summed or stored:
// a lane's operands are whole vectors of a row as they lie in memory. With g = lane / 4, t = lane % 4. SWIZZLED: key
// `place` of a tile is row `swizzled_row(place)`.
//
// Where K and V are of 8 bits (KvElement), both products are of fp16, which holds these numbers exactly. A row of a
// bf16 Q is multiplied by a power of two that brings its largest element to 2^14, so that what fp16 cannot hold of it
// is less than 2^-38 of that one.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/largest2.cuh"
#include "device/ptx/warp.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/ptx/eight_bits.cuh"
#include "device/copy/vector.cuh"
#include "split_kv/lane_pieces.cuh"
#include "device/merge/split_merge.cuh"

// The operands of one lane's part of a row of Q: [k16 step, two words].
template <typename Element, typename KvElement, int HEAD_DIM, int VECTOR_BYTES, int VECTORS> struct QueryWords {
  static constexpr int WORDS = VECTOR_BYTES / 4;
  static constexpr bool SCALED = false;
  LanePieces<Element, HEAD_DIM, VECTOR_BYTES, 1, 0, false, VECTORS, 2 * VECTOR_BYTES> pieces;

  __device__ __forceinline__ float load(const Element* first_gmem, bool valid, int columns) {
    pieces.load([first_gmem](int) { return first_gmem; }, valid, columns);
    return 1.f;
  }
  __device__ __forceinline__ uint32_t word(int step, int i) const {
    return pieces.at[0][(2 * step + i) / WORDS][(2 * step + i) % WORDS];
  }
};
template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int VECTORS> struct QueriesOfEightBits {
  static constexpr int STEPS_OF_VECTOR = VECTOR_BYTES / 4, STEPS = VECTORS * STEPS_OF_VECTOR;  // of four elements
  static constexpr bool SCALED = !SameType<Element, Fp16>::VALUE;
  uint32_t words[STEPS][2];

  // What the row's scores are to be multiplied by; all four lanes of a row call it.
  __device__ __forceinline__ float load(const Element* first_gmem, bool valid, int columns) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int column = i / STEPS_OF_VECTOR * 4 * VECTOR_BYTES + i % STEPS_OF_VECTOR * 4;
      load_streaming<8>(words[i], first_gmem + column, valid && column < columns);
    }
    if constexpr (!SCALED) return 1.f;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int word = 0; word < 2; ++word) most = larger2(most, words[i][word], Element{});
    float even, odd;
    unpack2(most, Element{}, even, odd);
    float largest = fmaxf(even, odd);
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    const PowerOfTwo power(largest);
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        float low, high;
        unpack2(words[i][word], Element{}, low, high);
        words[i][word] = pack2<Fp16>(low * power.factor, high * power.factor);
      }
    return power.inverse;
  }
  __device__ __forceinline__ uint32_t word(int step, int i) const { return words[step][i]; }
};
template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int VECTORS>
struct QueryWords<Element, E4m3, HEAD_DIM, VECTOR_BYTES, VECTORS>
    : QueriesOfEightBits<Element, HEAD_DIM, VECTOR_BYTES, VECTORS> {};
template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int VECTORS>
struct QueryWords<Element, E5m2, HEAD_DIM, VECTOR_BYTES, VECTORS>
    : QueriesOfEightBits<Element, HEAD_DIM, VECTOR_BYTES, VECTORS> {};
template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int VECTORS>
struct QueryWords<Element, Int8, HEAD_DIM, VECTOR_BYTES, VECTORS>
    : QueriesOfEightBits<Element, HEAD_DIM, VECTOR_BYTES, VECTORS> {};

template <typename Element, typename KvElement, int HEAD_DIM, int VECTOR_BYTES, int ROWS, int KEYS, bool SWIZZLED>
struct MmaRows {
  static constexpr bool EIGHT_BITS = sizeof(KvElement) == 1;
  using Operand = typename OperandOf<Element, EIGHT_BITS>::type;
  static constexpr int ROW_TILES = ROWS / 8, KEY_TILES = KEYS / 16, LANE_KEYS = 2 * KEY_TILES;
  static constexpr int WORDS = VECTOR_BYTES / 4, WIDTH = VECTOR_BYTES / int(sizeof(KvElement)), PAIRS = WIDTH / 2;
  static constexpr int K_VECTORS = WIDTH == 2 ? (HEAD_DIM + 15) / 16 * 2 : (HEAD_DIM + 4 * WIDTH - 1) / (4 * WIDTH);
  static constexpr int V_VECTORS = (HEAD_DIM + 8 * WIDTH - 1) / (8 * WIDTH);
  static constexpr int DIM_STEPS = K_VECTORS * PAIRS / 2;  // k16 steps of K Qᵀ
  static constexpr int DIM_TILES = V_VECTORS * PAIRS;      // m16 tiles of Vᵀ Pᵀ
  static_assert(ROWS == 8 * ROW_TILES && KEYS == 16 * KEY_TILES, "whole mma tiles");
  // Rows g, g + 8 of each tile.
  using K = LanePieces<KvElement, HEAD_DIM, VECTOR_BYTES, 2 * KEY_TILES, 8, false, K_VECTORS, 4 * WIDTH>;
  // 2t, 2t + 1, 2t + 8, 2t + 9.
  using V = LanePieces<KvElement, HEAD_DIM, VECTOR_BYTES, 4 * KEY_TILES, 0, true, V_VECTORS, 8 * WIDTH>;
  using Q = QueryWords<Element, KvElement, HEAD_DIM, VECTOR_BYTES, K_VECTORS>;

  const int g, t;
  Q q[ROW_TILES];                                // B operand: row g of each tile
  float s[ROW_TILES][KEY_TILES][4];              // Sᵀ, then Pᵀ: key g: rows 2t, 2t + 1 | key g + 8: the same
  float o[ROW_TILES][DIM_TILES][4];              // element 2m of vector g: rows 2t, 2t + 1 | element 2m + 1: the same
  float shift[ROW_TILES][2], sum[ROW_TILES][2];  // rows 2t, 2t + 1; the sum is of this lane's keys
  float unit[ROW_TILES][2];                      // Q::SCALED: of the scores of rows 2t, 2t + 1

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
  __device__ __forceinline__ int key_row(int i) const { return (SWIZZLED ? swizzled_row(g) : g) + 8 * i; }
  static constexpr __device__ __forceinline__ int key_group(int i) { return i / 2; }  // of 16 keys

  // `row_gmem(row)` is where query row `row` of the tile begins, null if there is none.
  template <typename RowPointer> __device__ __forceinline__ void load_q(RowPointer row_gmem, float scale) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const Element* lane_gmem = row_gmem(r * 8 + g);
      const float row_unit = q[r].load(lane_gmem + k_column(), lane_gmem != nullptr, HEAD_DIM - k_column());
#pragma unroll
      for (int e = 0; e < 2; ++e) unit[r][e] = Q::SCALED ? __shfl_sync(ALL_LANES, row_unit, (2 * t + e) * 4) : 1.f;
    }
  }

  // s = (Q Kᵀ)ᵀ · scale - shift, the exponent of P, with O and sums kept in step with a shift that is the highest score
  // so far. MASKED: keys from `limit(row)` on, and those before `hidden(row)`, counted from the tile's first, are not
  // seen. `row_terms(row, step)`: what `terms` do to the scores of a row from a key of the tile on.
  template <typename RowLimit, typename RowHidden, class Terms, typename TermsOfRow, class Scales>
  __device__ __forceinline__ void scores(const K& k, float scale, bool masked, RowLimit limit, RowHidden hidden,
                                         const Terms& terms, TermsOfRow row_terms, const Scales& scales) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        s[r][n][0] = s[r][n][1] = s[r][n][2] = s[r][n][3] = 0.f;
#pragma unroll
        for (int d = 0; d < DIM_STEPS; ++d) {
          uint32_t a[4];
          key_words(a, k, n, d);
          mma_m16n8k16<Operand>(s[r][n], a, q[r].word(d, 0), q[r].word(d, 1));
        }
      }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (Scales::ANY) {
#pragma unroll
          for (int n = 0; n < KEY_TILES; ++n) {
            s[r][n][e] *= unit[r][e] * scales.of_key(2 * n), s[r][n][e + 2] *= unit[r][e] * scales.of_key(2 * n + 1);
          }
        }
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
        if constexpr (Scales::PER_KEY) {
#pragma unroll
          for (int n = 0; n < KEY_TILES; ++n) {
            s[r][n][e] = fmaf(s[r][n][e], scale, __log2f(scales.v[2 * n]));
            s[r][n][e + 2] = fmaf(s[r][n][e + 2], scale, __log2f(scales.v[2 * n + 1]));
          }
        }
        const float last_scale = Scales::PER_KEY ? 1.f : scale;
        float highest = fmaxf(s[r][0][e], s[r][0][e + 2]);
#pragma unroll
        for (int n = 1; n < KEY_TILES; ++n) highest = fmaxf(highest, fmaxf(s[r][n][e], s[r][n][e + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
        const float before = shift[r][e];
        shift[r][e] = fmaxf(before, highest * last_scale);
        const float factor = exp2_approx(before - shift[r][e]);
        sum[r][e] *= factor;
#pragma unroll
        for (int m = 0; m < DIM_TILES; ++m) o[r][m][e] *= factor, o[r][m][e + 2] *= factor;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
          s[r][n][e] = exp2_approx(fmaf(s[r][n][e], last_scale, -shift[r][e]));
          s[r][n][e + 2] = exp2_approx(fmaf(s[r][n][e + 2], last_scale, -shift[r][e]));
          if constexpr (Scales::PER_KEY) {
            sum[r][e] += __fdividef(s[r][n][e], scales.v[2 * n]) + __fdividef(s[r][n][e + 2], scales.v[2 * n + 1]);
          } else {
            sum[r][e] += s[r][n][e] + s[r][n][e + 2];
          }
        }
      }
  }

  // The A operand of k16 step `d` of K Qᵀ, of keys 16 n + g and 16 n + g + 8.
  static __device__ __forceinline__ void key_words(uint32_t (&a)[4], const K& k, int n, int d) {
    if constexpr (EIGHT_BITS) {
      to_halves<KvElement>(k.at[2 * n][d / WORDS][d % WORDS], a[0], a[2]);
      to_halves<KvElement>(k.at[2 * n + 1][d / WORDS][d % WORDS], a[1], a[3]);
    } else {
      const int vector = 2 * d / WORDS, word = 2 * d % WORDS, next = (2 * d + 1) / WORDS,
                next_word = (2 * d + 1) % WORDS;
      a[0] = k.at[2 * n][vector][word], a[1] = k.at[2 * n + 1][vector][word];
      a[2] = k.at[2 * n][next][next_word], a[3] = k.at[2 * n + 1][next][next_word];
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
        p[r][0] = transposed(pack2<Operand>(s[r][n][0], s[r][n][1]));
        p[r][1] = transposed(pack2<Operand>(s[r][n][2], s[r][n][3]));
      }
      if constexpr (EIGHT_BITS) {
#pragma unroll
        for (int m = 0; m < DIM_TILES; m += 2) {  // elements 0 and 1, then 2 and 3 of a word
          uint32_t x[4], a[2][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = v.at[4 * n + i][m / 2 / WORDS][m / 2 % WORDS];
#pragma unroll
          for (int half = 0; half < 2; ++half) {  // keys side by side, then converted
            const uint32_t order = half ? 0x7362 : 0x5140;
            to_halves<KvElement>(__byte_perm(x[0], x[1], order), a[half][0], a[half][1]);
            to_halves<KvElement>(__byte_perm(x[2], x[3], order), a[half][2], a[half][3]);
          }
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) mma_m16n8k16<Operand>(o[r][m + half], a[half], p[r][0], p[r][1]);
        }
        continue;
      }
#pragma unroll
      for (int m = 0; m < DIM_TILES; ++m) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = v.at[4 * n + i][m / WORDS][m % WORDS];
        const uint32_t a[4] = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                               __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632)};
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) mma_m16n8k16<Operand>(o[r][m], a, p[r][0], p[r][1]);
      }
    }
  }

  // This warp's result as source `source` of a merge.
  template <typename Buffer> __device__ __forceinline__ void put(const Buffer& buffer, int source, float v_factor) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = r * 8 + 2 * t + e;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[r][e] += __shfl_xor_sync(ALL_LANES, sum[r][e], step);
        if (g == 0) *buffer.state(source, row) = make_float2(shift[r][e], sum[r][e]);
#pragma unroll
        for (int m = 0; m < DIM_TILES; ++m) o[r][m][e] *= v_factor, o[r][m][e + 2] *= v_factor;
#pragma unroll
        for (int v = 0; v < V_VECTORS; ++v) {
          const int column = (v * 8 + g) * WIDTH;
          if (V_VECTORS * 8 * WIDTH != HEAD_DIM && column >= HEAD_DIM) continue;
#pragma unroll
          for (int m = v * PAIRS; m < (v + 1) * PAIRS; m += PAIRS == 1 ? 1 : 2) {
            float* place = buffer.place(source, row, column + 2 * (m - v * PAIRS));
            if constexpr (PAIRS == 1) *reinterpret_cast<float2*>(place) = make_float2(o[r][m][e], o[r][m][e + 2]);
            else
              *reinterpret_cast<float4*>(place) =
                  make_float4(o[r][m][e], o[r][m][e + 2], o[r][m + 1][e], o[r][m + 1][e + 2]);
          }
        }
      }
  }
};
