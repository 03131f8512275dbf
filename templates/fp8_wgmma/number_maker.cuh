// number_maker.cuh: Q, K and V of 16 bits become numbers of 8 bits while others are multiplied. Warps that have nothing
// else to do take chunks of rows, one after another, by a counter in memory: those beside the producer, and consumers
// that wait for Q. Rows of a K/V head, its queries, keys and values, are a unit. Of a unit each tensor's largest
// magnitude is found first, which gives its scale, and numbers are written when all chunks have been looked at; V is
// turned. A producer waits for the unit of its tile. Nobody waits for a chunk that no running warp has taken, and
// whoever writes waits only for chunks before its own, so that it does not matter which blocks run at once.
#include "device/ptx/e4m3.cuh"
#include "device/ptx/flags.cuh"
#include "device/ptx/largest2.cuh"
#include "device/ptx/load_streaming.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"
#include "flash_wgmma/running_scales.cuh"

// A tensor of 16 bits, strides in elements, and where its numbers go.
template <class Wide> struct WideTensor {
  const Wide* wide;
  int64_t batch_stride, head_stride, row_stride;
  uint8_t* numbers;
};

// TOGETHER units are a group, of which the first is needed at once. Magnitudes of a group are looked for before numbers
// of the group before it are written, so that few wait.
template <class Wide, int HEAD_DIM, int VALUE_DIM, int LOADS> struct NumberMaker {
  static constexpr bool MADE = true;
  static constexpr int CHUNK = 4096;  // elements, at most
  static constexpr int GROUP = 16;    // keys of V that lie together
  static constexpr float LARGEST = 448.f, LEAST_SCALE = 1.17549435e-38f;
  static constexpr int CLAIMED = 0, LEFT = 1, UNITS = 2;                // words
  static constexpr int SIZES = 0, LOOKED = 3, WRITTEN = 4, A_UNIT = 5;  // of a unit

  WideTensor<Wide> q, k, v;
  uint32_t* words_zeroed;
  int together;
  int batch, heads, kv_heads, seqlen_q, seqlen_k;

  __device__ __forceinline__ void take_sizes(int batches, int all_heads, int of_keys, int queries, int keys) {
    batch = batches, heads = all_heads, kv_heads = of_keys, seqlen_q = queries, seqlen_k = keys;
  }
  static __device__ constexpr int rows_of_chunk(int dim) { return CHUNK / dim / GROUP * GROUP; }
  static __device__ __forceinline__ float scale_of(uint32_t size) {
    const float most = __uint_as_float(size);
    return most > 0.f ? fmaxf(most / LARGEST, LEAST_SCALE) : 1.f;
  }
  __device__ __forceinline__ uint32_t* unit_words(int unit) const { return words_zeroed + UNITS + unit * A_UNIT; }
  __device__ __forceinline__ int unit_of(int batch, int kv_head) const { return batch * kv_heads + kv_head; }
  // Of tensor 0 to 2, once a unit is written.
  __device__ __forceinline__ float scale(int batch, int kv_head, int tensor) const {
    return scale_of(peek(unit_words(unit_of(batch, kv_head)) + SIZES + tensor));
  }

  static constexpr int Q_ROWS = rows_of_chunk(HEAD_DIM), V_ROWS = rows_of_chunk(VALUE_DIM);
  __device__ __forceinline__ int q_chunks() const { return (seqlen_q + Q_ROWS - 1) / Q_ROWS; }  // of a head
  __device__ __forceinline__ int k_chunks() const { return (seqlen_k + Q_ROWS - 1) / Q_ROWS; }
  __device__ __forceinline__ int v_chunks() const { return (seqlen_k + V_ROWS - 1) / V_ROWS; }
  __device__ __forceinline__ int chunks() const { return heads / kv_heads * q_chunks() + k_chunks() + v_chunks(); }

  // By one thread: what copies from here on bring of the unit is there.
  __device__ __forceinline__ void await(int batch, int kv_head) const {
    const uint32_t* written = unit_words(unit_of(batch, kv_head)) + WRITTEN;
    const uint32_t all = chunks();
    while (acquire(written) < all) {}
    fence_proxy_async_all();
  }

  // By a warp: takes the next chunk, if any is left, and makes it.
  __device__ __forceinline__ bool make_one(int lane) const {
    int claim = 0;
    if (lane == 0) claim = count_one(words_zeroed + CLAIMED);
    forget_origin(lane);
    return make(__shfl_sync(ALL_LANES, claim, 0), lane);
  }
  __device__ __forceinline__ void make_all(int lane) const {
    while (make_one(lane)) {}
  }
  // By each warp of the grid, when it asks for nothing any more: the last one leaves zeros.
  __device__ __forceinline__ void leave(int warps, int lane) const {
    uint32_t before = 0;
    __syncwarp();
    if (lane == 0) before = exchange_count(words_zeroed + LEFT, gridDim.x * warps - 1);
    if (__shfl_sync(ALL_LANES, before, 0) != gridDim.x * warps - 1) return;
    if (lane == 0) words_zeroed[CLAIMED] = 0;
    for (int i = lane; i < batch * kv_heads * A_UNIT; i += 32) words_zeroed[UNITS + i] = 0;
  }

private:
  // Slots of a group each: look 0, write 0, look 1, then look i + 1 and write i by turns. False if none is left.
  __device__ __forceinline__ bool make(int claim, int lane) const {
    const int units = batch * kv_heads, each = chunks(), groups = (units + together - 1) / together;
    const int slot = claim / (together * each), place = claim - slot * (together * each);
    if (slot > 2 * groups) return false;
    const bool writes = slot == 1 || (slot > 2 && slot % 2 == 0);
    const int group = slot < 3 ? slot / 2 : slot % 2 ? (slot + 1) / 2 : slot / 2 - 1;
    const int unit = group * together + place / each, chunk = place % each;
    if (unit >= units || group >= groups) return true;
    const int of_q = heads / kv_heads * q_chunks(), of_k = of_q + k_chunks();
    const int in_batch = unit / kv_heads, kv_head = unit - in_batch * kv_heads;
    uint32_t* words = unit_words(unit);
    if (writes) {
      while (acquire(words + LOOKED) < uint32_t(each)) {}
    }
    auto rows_of = [&](const WideTensor<Wide>& of, int head, int place, int first, int seqlen, int tensor) {
      if (writes) write<HEAD_DIM>(of, in_batch, head, place, first, seqlen, words + SIZES + tensor, lane);
      else look<HEAD_DIM>(of, in_batch, head, first, seqlen, words + SIZES + tensor, lane);
    };
    if (chunk < of_q) {
      const int in_group = chunk / q_chunks(), head = kv_head * (heads / kv_heads) + in_group;
      rows_of(q, head, in_batch * heads + head, (chunk - in_group * q_chunks()) * Q_ROWS, seqlen_q, 0);
    } else if (chunk < of_k) {
      rows_of(k, kv_head, unit, (chunk - of_q) * Q_ROWS, seqlen_k, 1);
    } else if (!writes) {
      look<VALUE_DIM>(v, in_batch, kv_head, (chunk - of_k) * V_ROWS, seqlen_k, words + SIZES + 2, lane);
    } else {
      turn(in_batch, kv_head, unit, (chunk - of_k) * V_ROWS, 1.f / scale_of(peek(words + SIZES + 2)), lane);
    }
    if (writes) fence_proxy_async_all();  // copies see what was written
    __syncwarp();
    if (lane == 0) release_one(words + (writes ? WRITTEN : LOOKED));
    return true;
  }
  static __device__ __forceinline__ float rounded(float x, float inverse) {
    return fmaf(x, 0.f, x * inverse);  // of infinities NaN
  }
  // How lanes share rows of DIM: LANES of them take 8 columns of a row each, if it has so many.
  template <int DIM> struct Lanes {
    static constexpr int LANES = DIM > 128 ? 32 : DIM > 64 ? 16 : DIM > 32 ? 8 : 4, ROWS = 32 / LANES;
    int row, column;
    __device__ __forceinline__ Lanes(int lane) : row(lane / LANES), column(lane % LANES * 8) {}
    // body(row, words) for the lane's rows of `count` from x on; words of others are 0.
    template <class Body>
    __device__ __forceinline__ void for_rows(const Wide* x, int64_t stride, int count, Body body) const {
      forget_origin(stride);
      const Wide* from = x + row * stride + column;
      for (int first = row; first < count; first += ROWS * LOADS) {
        uint32_t words[LOADS][4];
#pragma unroll
        for (int u = 0; u < LOADS; ++u, from += ROWS * stride)
          load_streaming<16>(words[u], from, column < DIM && first + u * ROWS < count);
#pragma unroll
        for (int u = 0; u < LOADS; ++u) body(first + u * ROWS, words[u]);
      }
    }
  };
  // The largest magnitude of rows from `first` on, of those that are numbers.
  template <int DIM>
  __device__ __forceinline__ void look(const WideTensor<Wide>& of, int in_batch, int head, int first, int seqlen,
                                       uint32_t* size_gmem, int lane) const {
    const Wide* x = of.wide + in_batch * of.batch_stride + head * of.head_stride + first * of.row_stride;
    const Lanes<DIM> lanes(lane);
    const int count = min(rows_of_chunk(DIM), seqlen - first);
    uint32_t most = 0;
    lanes.for_rows(x, of.row_stride, count, [&](int, const uint32_t(&words)[4]) {
#pragma unroll
      for (int w = 0; w < 4; ++w) most = larger2(most, words[w], Wide{});
    });
    float low, high;
    unpack2(most, Wide{}, low, high);
    float size = fmaxf(low, high);
    if (!is_number(size)) {
      size = 0.f;
      lanes.for_rows(x, of.row_stride, count, [&](int, const uint32_t(&words)[4]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          unpack2(words[w], Wide{}, low, high);
          if (is_number(low)) size = fmaxf(size, fabsf(low));
          if (is_number(high)) size = fmaxf(size, fabsf(high));
        }
      });
    }
#pragma unroll
    for (int shift = 16; shift > 0; shift /= 2) size = fmaxf(size, __shfl_xor_sync(ALL_LANES, size, shift));
    if (lane == 0) atomicMax(size_gmem, __float_as_uint(size));
  }
  static __device__ __forceinline__ bool is_number(float x) { return fabsf(x) <= 3.4028235e38f; }
  // The numbers of rows from `first` on; `place` counts heads of all batches.
  template <int DIM>
  __device__ __forceinline__ void write(const WideTensor<Wide>& of, int in_batch, int head, int place, int first,
                                        int seqlen, const uint32_t* size_gmem, int lane) const {
    const Wide* x = of.wide + in_batch * of.batch_stride + head * of.head_stride + first * of.row_stride;
    const Lanes<DIM> lanes(lane);
    uint8_t* numbers = of.numbers + (int64_t(place) * seqlen + first) * DIM + lanes.column;
    const int count = min(rows_of_chunk(DIM), seqlen - first);
    const float inverse = 1.f / scale_of(peek(size_gmem));
    lanes.for_rows(x, of.row_stride, count, [&](int row, const uint32_t(&words)[4]) {
      Vector<uint32_t, 2> made;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        float y[4];
        unpack2(words[2 * w], Wide{}, y[0], y[1]), unpack2(words[2 * w + 1], Wide{}, y[2], y[3]);
        made.at[w] = pack4_e4m3(rounded(y[0], inverse), rounded(y[1], inverse), rounded(y[2], inverse),
                                rounded(y[3], inverse));
      }
      if (lanes.column < DIM && row < count) store_global(numbers + row * DIM, made);
    });
  }
  // Keys from `first` on as numbers of V, [VALUE_DIM, keys rounded up to whole GROUPs, of zeros]: of each group place 4t
  // + e has key 2t + e % 2 + e / 2 · 8. A lane takes two columns of a group.
  __device__ __forceinline__ void turn(int in_batch, int kv_head, int unit, int first, float inverse, int lane) const {
    constexpr int PAIRS = VALUE_DIM / 2, ITEMS = V_ROWS / GROUP * PAIRS;
    const int padded = (seqlen_k + GROUP - 1) / GROUP * GROUP;
    const Wide* x = v.wide + in_batch * v.batch_stride + kv_head * v.head_stride + first * v.row_stride;
    uint8_t* numbers = v.numbers + int64_t(unit) * VALUE_DIM * padded + first;
#pragma unroll 1
    for (int i = lane; i < ITEMS; i += 32) {
      const int key = i / PAIRS * GROUP, column = i % PAIRS * 2, left = seqlen_k - first - key;
      if (left <= 0) continue;
      int64_t stride = v.row_stride;
      forget_origin(stride);
      const Wide* from = x + key * stride + column;
      Vector<uint32_t, 4> low, high;
#pragma unroll
      for (int t = 0; t < 4; ++t, from += 2 * stride) {
        uint32_t words[4][1];
        float a[4], b[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int apart = e % 2 + e / 2 * 8;
          load_streaming<4>(words[e], from + apart * stride, 2 * t + apart < left);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          unpack2(words[e][0], Wide{}, a[e], b[e]);
          a[e] = rounded(a[e], inverse), b[e] = rounded(b[e], inverse);
        }
        low.at[t] = pack4_e4m3(a[0], a[1], a[2], a[3]), high.at[t] = pack4_e4m3(b[0], b[1], b[2], b[3]);
      }
      store_global(numbers + int64_t(column) * padded + key, low);
      store_global(numbers + int64_t(column + 1) * padded + key, high);
    }
  }
};

// Scales that such a kernel finds itself.
template <class Numbers> struct MadeScales {
  static constexpr bool GIVEN = true, BY_BLOCK = false;
  using Running = NoBlockScales;
  Numbers numbers;
  template <class Given>
  static __device__ __forceinline__ MadeScales of(const Numbers& numbers, const Given&, const Given&, const Given&) {
    return {numbers};
  }
  __device__ __forceinline__ float of_scores(int batch, int kv_head) const {
    return not_zero(numbers.scale(batch, kv_head, 0) * numbers.scale(batch, kv_head, 1));
  }
  __device__ __forceinline__ float of_values(int batch, int kv_head) const { return numbers.scale(batch, kv_head, 2); }
};
