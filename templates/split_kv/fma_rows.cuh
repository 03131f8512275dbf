// fma_rows.cuh: attention of one warp's keys for a few query rows on CUDA cores. LANES lanes share a key: each has
// COLUMNS of its elements, and the same of Q and O. The 32 / LANES groups of lanes take different keys and keep a
// softmax each, until `put` merges them. SWIZZLED: key `place` of a tile is row `swizzled_row(place)`.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"
#include "split_kv/lane_pieces.cuh"
#include "device/merge/split_merge.cuh"

template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int ROWS, int KEYS, int LANES, bool SWIZZLED>
struct FmaRows {
  static constexpr int WIDTH = VECTOR_BYTES / int(sizeof(Element)), GROUPS = 32 / LANES, KEY_STEPS = KEYS / GROUPS;
  static constexpr int VECTORS = (HEAD_DIM + LANES * WIDTH - 1) / (LANES * WIDTH), COLUMNS = VECTORS * WIDTH;
  static_assert(KEYS == KEY_STEPS * GROUPS, "every group of lanes has as many keys");
  using K = LanePieces<Element, HEAD_DIM, VECTOR_BYTES, KEY_STEPS, GROUPS, false, VECTORS, LANES * WIDTH>;
  using V = K;
  using Q = LanePieces<Element, HEAD_DIM, VECTOR_BYTES, 1, 0, false, VECTORS, LANES * WIDTH>;

  const int group, lane_of_key;
  float q[ROWS][COLUMNS];    // times the scale that `load_q` was given
  float s[ROWS][KEY_STEPS];  // scores, then probabilities, of the group's keys
  float o[ROWS][COLUMNS];
  float shift[ROWS], sum[ROWS];  // of the group

  __device__ __forceinline__ explicit FmaRows(int lane) : group(lane / LANES), lane_of_key(lane % LANES) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      shift[r] = NO_KEY, sum[r] = 0.f;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) o[r][c] = 0.f;
    }
  }
  __device__ __forceinline__ int k_row() const { return group; }
  __device__ __forceinline__ int k_column() const { return lane_of_key * WIDTH; }
  __device__ __forceinline__ int v_row() const { return group; }
  __device__ __forceinline__ int v_column() const { return lane_of_key * WIDTH; }

  static __device__ __forceinline__ void unpack(float (&x)[WIDTH], const uint32_t (&words)[VECTOR_BYTES / 4]) {
    if constexpr (sizeof(Element) == 2) {
#pragma unroll
      for (int i = 0; i < WIDTH; i += 2) unpack2(words[i / 2], Element{}, x[i], x[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) x[i] = __uint_as_float(words[i]);
    }
  }

  // `row_gmem(row)` is where query row `row` of the tile begins, null if there is none.
  template <typename RowPointer> __device__ __forceinline__ void load_q(RowPointer row_gmem, float scale) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Element* lane_gmem = row_gmem(r);
      Q pieces;
      const Element* first_gmem = lane_gmem + k_column();
      pieces.load([first_gmem](int) { return first_gmem; }, lane_gmem != nullptr, HEAD_DIM - k_column());
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        float x[WIDTH];
        unpack(x, pieces.at[0][v]);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) q[r][v * WIDTH + i] = x[i] * scale;
      }
    }
  }

  // s = 2^(Q Kᵀ · scale - shift), with O and sums kept in step with a shift that is the group's highest score so far.
  // MASKED: keys from `limit(row)` on, and those before `hidden(row)`, counted from the tile's first, are not seen.
  // `row_terms(row, step)`: what `terms` do to the scores of a row from a key of the tile on; Q is not yet scaled then.
  template <typename RowLimit, typename RowHidden, class Terms, typename TermsOfRow>
  __device__ __forceinline__ void scores(const K& k, float scale, bool masked, RowLimit limit, RowHidden hidden,
                                         const Terms& terms, TermsOfRow row_terms) {
#pragma unroll
    for (int j = 0; j < KEY_STEPS; ++j) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) s[r][j] = 0.f;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        float x[WIDTH];
        unpack(x, k.at[j][v]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) s[r][j] = fmaf(q[r][v * WIDTH + i], x[i], s[r][j]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) s[r][j] += __shfl_xor_sync(ALL_LANES, s[r][j], step);
        const int place = j * GROUPS + group, key = SWIZZLED ? swizzled_row(place) : place;
        if constexpr (Terms::ANY) s[r][j] = terms.of(s[r][j], row_terms(r, key), 0) * scale;
        if (masked && key >= limit(r)) s[r][j] = NEGATIVE_INFINITY;
        if constexpr (Terms::WINDOW) {
          if (masked && key < hidden(r)) s[r][j] = NEGATIVE_INFINITY;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float before = shift[r];
#pragma unroll
      for (int j = 0; j < KEY_STEPS; ++j) shift[r] = fmaxf(shift[r], s[r][j]);
      rescale(r, exp2_approx(before - shift[r]));
#pragma unroll
      for (int j = 0; j < KEY_STEPS; ++j) {
        s[r][j] = exp2_approx(s[r][j] - shift[r]);
        sum[r] += s[r][j];
      }
    }
  }
  __device__ __forceinline__ void rescale(int row, float factor) {
    sum[row] *= factor;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) o[row][c] *= factor;
  }

  // O += P V.
  __device__ __forceinline__ void accumulate(const V& values) {
#pragma unroll
    for (int j = 0; j < KEY_STEPS; ++j)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        float x[WIDTH];
        unpack(x, values.at[j][v]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) o[r][v * WIDTH + i] = fmaf(s[r][j], x[i], o[r][v * WIDTH + i]);
      }
  }

  // This warp's result as source `source` of a merge.
  template <typename Buffer> __device__ __forceinline__ void put(const Buffer& buffer, int source) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float highest = shift[r];
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
      rescale(r, exp2_approx(shift[r] - highest));
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) {
        sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], step);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) o[r][c] += __shfl_xor_sync(ALL_LANES, o[r][c], step);
      }
      if (group > 0) continue;
      if (lane_of_key == 0) *buffer.state(source, r) = make_float2(highest, sum[r]);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int column = (v * LANES + lane_of_key) * WIDTH;
        if (VECTORS * LANES * WIDTH != HEAD_DIM && column >= HEAD_DIM) continue;
#pragma unroll
        for (int i = 0; i < WIDTH; i += WIDTH < 4 ? WIDTH : 4) {
          float* place = buffer.place(source, r, column + i);
          const float* x = o[r] + v * WIDTH + i;
          if constexpr (WIDTH >= 4) *reinterpret_cast<float4*>(place) = make_float4(x[0], x[1], x[2], x[3]);
          else if constexpr (WIDTH == 2) *reinterpret_cast<float2*>(place) = make_float2(x[0], x[1]);
          else *place = x[0];
        }
      }
    }
  }
};
