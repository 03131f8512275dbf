// fma_rows.cuh: attention of one warp's keys for a few query rows on CUDA cores. LANES lanes share a key: each has
// COLUMNS of its elements, and the same of Q and O. The 32 / LANES groups of lanes take different keys and keep a
// softmax each, until `put` merges them. SWIZZLED: key `place` of a tile is row `swizzled_row(place)`.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"
#include "device/ptx/eight_bits.cuh"
#include "split_kv/lane_pieces.cuh"
#include "device/merge/split_merge.cuh"

template <typename Element, typename KvElement, int HEAD_DIM, int VECTOR_BYTES, int ROWS, int KEYS, int LANES,
          bool SWIZZLED>
struct FmaRows {
  static constexpr int WIDTH = VECTOR_BYTES / int(sizeof(KvElement)), GROUPS = 32 / LANES, KEY_STEPS = KEYS / GROUPS;
  static constexpr int VECTORS = (HEAD_DIM + LANES * WIDTH - 1) / (LANES * WIDTH), COLUMNS = VECTORS * WIDTH;
  static_assert(KEYS == KEY_STEPS * GROUPS, "every group of lanes has as many keys");
  using K = LanePieces<KvElement, HEAD_DIM, VECTOR_BYTES, KEY_STEPS, GROUPS, false, VECTORS, LANES * WIDTH>;
  using V = K;
  static constexpr int LANE_KEYS = KEY_STEPS;
  static constexpr int QUERY_BYTES = WIDTH * int(sizeof(Element)) < 16 ? WIDTH * int(sizeof(Element)) : 16;
  static constexpr int QUERY_WIDTH = QUERY_BYTES / int(sizeof(Element));  // elements of a load of Q

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
  __device__ __forceinline__ int key_row(int i) const {
    return SWIZZLED ? swizzled_row(i * GROUPS + group) : i * GROUPS + group;
  }
  static constexpr __device__ __forceinline__ int key_group(int i) { return i * GROUPS / 16; }  // of 16 keys

  template <typename Of, int COUNT, int WORDS>
  static __device__ __forceinline__ void unpack(float (&x)[COUNT], const uint32_t (&words)[WORDS]) {
    if constexpr (sizeof(Of) == 1) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        uint32_t low, high;
        to_halves<Of>(words[i / 4], low, high);
        unpack2(low, Fp16{}, x[i], x[i + 1]);
        unpack2(high, Fp16{}, x[i + 2], x[i + 3]);
      }
    } else if constexpr (sizeof(Of) == 2) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 2) unpack2(words[i / 2], Of{}, x[i], x[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) x[i] = __uint_as_float(words[i]);
    }
  }

  // `row_gmem(row)` is where query row `row` of the tile begins, null if there is none.
  template <typename RowPointer> __device__ __forceinline__ void load_q(RowPointer row_gmem, float scale) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Element* lane_gmem = row_gmem(r);
      uint32_t words[COLUMNS / QUERY_WIDTH][QUERY_BYTES / 4];
#pragma unroll
      for (int i = 0; i < COLUMNS; i += QUERY_WIDTH) {
        const int column = k_column() + i / WIDTH * LANES * WIDTH + i % WIDTH;
        load_streaming<QUERY_BYTES>(words[i / QUERY_WIDTH], lane_gmem + column,
                                    lane_gmem != nullptr && (K::WHOLE_ROWS || column < HEAD_DIM));
      }
#pragma unroll
      for (int i = 0; i < COLUMNS; i += QUERY_WIDTH) {
        float x[QUERY_WIDTH];
        unpack<Element>(x, words[i / QUERY_WIDTH]);
#pragma unroll
        for (int j = 0; j < QUERY_WIDTH; ++j) q[r][i + j] = x[j] * scale;
      }
    }
  }

  // s = 2^(Q Kᵀ · scale - shift), with O and sums kept in step with a shift that is the group's highest score so far.
  // MASKED: keys from `limit(row)` on, and those before `hidden(row)`, counted from the tile's first, are not seen.
  // `row_terms(row, step)`: what `terms` do to the scores of a row from a key of the tile on; Q is not yet scaled then.
  template <typename RowLimit, typename RowHidden, class Terms, typename TermsOfRow, class Scales>
  __device__ __forceinline__ void scores(const K& k, float scale, bool masked, RowLimit limit, RowHidden hidden,
                                         const Terms& terms, TermsOfRow row_terms, const Scales& scales) {
#pragma unroll
    for (int j = 0; j < KEY_STEPS; ++j) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) s[r][j] = 0.f;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        float x[WIDTH];
        unpack<KvElement>(x, k.at[j][v]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) s[r][j] = fmaf(q[r][v * WIDTH + i], x[i], s[r][j]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) s[r][j] += __shfl_xor_sync(ALL_LANES, s[r][j], step);
        const int key = key_row(j);
        if constexpr (Scales::ANY) s[r][j] *= scales.of_key(j);
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
        if constexpr (Scales::PER_KEY) s[r][j] *= scales.v[j];
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
        unpack<KvElement>(x, values.at[j][v]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) o[r][v * WIDTH + i] = fmaf(s[r][j], x[i], o[r][v * WIDTH + i]);
      }
  }

  // This warp's result as source `source` of a merge.
  template <typename Buffer> __device__ __forceinline__ void put(const Buffer& buffer, int source, float v_factor) {
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
          float* x = o[r] + v * WIDTH + i;
#pragma unroll
          for (int j = 0; j < (WIDTH < 4 ? WIDTH : 4); ++j) x[j] *= v_factor;
          if constexpr (WIDTH >= 4) *reinterpret_cast<float4*>(place) = make_float4(x[0], x[1], x[2], x[3]);
          else if constexpr (WIDTH == 2) *reinterpret_cast<float2*>(place) = make_float2(x[0], x[1]);
          else *place = x[0];
        }
      }
    }
  }
};
