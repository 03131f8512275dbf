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
// of the group before it are written, so that few wait. LOADS: of 16 bytes, of a lane beside the producer at a time;
// consumers have registers for twice as many.
template <class Wide, int HEAD_DIM, int VALUE_DIM, int LOADS> struct NumberMaker {
  static constexpr bool MADE = true;
  static constexpr int CHUNK = 4096;  // elements, at most
  static constexpr int GROUP = 16;    // keys of V that lie together
  static constexpr float LARGEST = 448.f, LEAST_SCALE = 1.17549435e-38f, FINITE = 3.4028235e38f;
  static constexpr int CLAIMED = 0, LEFT = 1, UNITS = 2;                // words
  static constexpr int SIZES = 0, LOOKED = 3, WRITTEN = 4, A_UNIT = 5;  // of a unit

  WideTensor<Wide> q, k, v;
  uint32_t* words_zeroed;
  int together;
  int batch, heads, kv_heads, seqlen_q, seqlen_k;

  __device__ __forceinline__ void take_sizes(int batches, int all_heads, int of_keys, int queries, int keys) {
    batch = batches, heads = all_heads, kv_heads = of_keys, seqlen_q = queries, seqlen_k = keys;
  }
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

  static __device__ constexpr int rows_of_chunk(int dim) { return CHUNK / dim / GROUP * GROUP; }
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
    return make<2 * LOADS>(__shfl_sync(ALL_LANES, claim, 0), lane);
  }
  // By a warp that has nothing else to do; the next chunk is claimed while one is made.
  __device__ __forceinline__ void make_all(int lane) const {
    int next = 0;
    if (lane == 0) next = count_one(words_zeroed + CLAIMED);
    for (;;) {
      const int claim = __shfl_sync(ALL_LANES, next, 0);
      if (lane == 0) next = count_one(words_zeroed + CLAIMED);
      forget_origin(lane);  // or what depends on it alone would be kept in registers
      if (!make<LOADS>(claim, lane)) return;
    }
  }
  // By each warp of the grid, when it asks for nothing any more: the last one leaves zeros.
  __device__ __forceinline__ void leave(int warps, int lane) const {
    uint32_t before = 0;
    __syncwarp();  // no lane reads the words after lane 0 has said that the warp is done
    if (lane == 0) before = exchange_count(words_zeroed + LEFT, gridDim.x * warps - 1);
    if (__shfl_sync(ALL_LANES, before, 0) != gridDim.x * warps - 1) return;
    if (lane == 0) words_zeroed[CLAIMED] = 0;
    for (int i = lane; i < batch * kv_heads * A_UNIT; i += 32) words_zeroed[UNITS + i] = 0;
  }

private:
  // Slots of a group each: look 0, write 0, look 1, then look i + 1 and write i by turns. False if none is left.
  template <int AT_ONCE> __device__ __forceinline__ bool make(int claim, int lane) const {
    const int units = batch * kv_heads, each = chunks(), groups = (units + together - 1) / together;
    const int slot = claim / (together * each), place = claim - slot * (together * each);
    if (slot > 2 * groups) return false;
    const bool writes = slot == 1 || (slot > 2 && slot % 2 == 0);
    const int group = slot < 3 ? slot / 2 : slot % 2 ? (slot + 1) / 2 : slot / 2 - 1;
    const int in_group = place / each, unit = group * together + in_group;
    if (unit >= units || group >= groups) return true;
    int chunk = place - in_group * each, head = unit % kv_heads, numbers_head = unit;
    const int of_batch = unit / kv_heads, of_q = heads / kv_heads * q_chunks();
    uint32_t* words = unit_words(unit);
    const int tensor = chunk < of_q ? 0 : chunk < of_q + k_chunks() ? 1 : 2;
    if (tensor == 0) {
      const int in_unit = chunk / q_chunks();
      chunk -= in_unit * q_chunks(), head = head * (heads / kv_heads) + in_unit, numbers_head = of_batch * heads + head;
    } else {
      chunk -= of_q + (tensor == 2 ? k_chunks() : 0);
    }
    auto of_tensor = [&](auto a, auto b, auto c) { return tensor == 0 ? a : tensor == 1 ? b : c; };
    const int64_t stride = of_tensor(q.row_stride, k.row_stride, v.row_stride);
    const int first = chunk * (tensor == 2 ? V_ROWS : Q_ROWS), seqlen = tensor == 0 ? seqlen_q : seqlen_k;
    const Wide* x = of_tensor(q.wide, k.wide, v.wide) +
                    of_batch * of_tensor(q.batch_stride, k.batch_stride, v.batch_stride) +
                    head * of_tensor(q.head_stride, k.head_stride, v.head_stride) + first * stride;
    if (tensor == 2 && writes) {
      turn(x, unit, first, inverse_of(words, tensor, lane), lane);
    } else if (HEAD_DIM != VALUE_DIM && tensor == 2) {
      look<VALUE_DIM, AT_ONCE>(x, stride, min(V_ROWS, seqlen - first), words + SIZES + tensor, lane);
    } else if (!writes) {
      look<HEAD_DIM, AT_ONCE>(x, stride, min(Q_ROWS, seqlen - first), words + SIZES + tensor, lane);
    } else {
      uint8_t* numbers = (tensor == 0 ? q.numbers : k.numbers) + (int64_t(numbers_head) * seqlen + first) * HEAD_DIM;
      write<AT_ONCE>(x, stride, min(Q_ROWS, seqlen - first), numbers, words, tensor, lane);
    }
    if (writes) fence_proxy_async_all();  // copies see what was written
    __syncwarp();                         // lane 0 counts what all lanes have done
    if (lane == 0) release_one(words + (writes ? WRITTEN : LOOKED));
    return true;
  }
  // Of a tensor's scale, once all of it was looked at.
  __device__ __forceinline__ float inverse_of(const uint32_t* words, int tensor, int lane) const {
    if (lane == 0) {
      while (acquire(words + LOOKED) < uint32_t(chunks())) {}
    }
    __syncwarp();  // all lanes read sizes after lane 0 has seen the last count
    return 1.f / scale_of(peek(words + SIZES + tensor));
  }
  static __device__ __forceinline__ bool is_number(float x) { return fabsf(x) <= FINITE; }
  static __device__ __forceinline__ float rounded(float x, float inverse) {
    return fmaf(x, 0.f, x * inverse);  // of infinities NaN
  }
  // How lanes share rows of DIM: LANES of them take 8 columns of a row each, if it has so many.
  template <int DIM, int AT_ONCE> struct Lanes {
    static constexpr int LANES = DIM > 128 ? 32 : DIM > 64 ? 16 : DIM > 32 ? 8 : 4, ROWS = 32 / LANES;
    const int row, column;
    __device__ __forceinline__ Lanes(int lane) : row(lane / LANES), column(lane % LANES * 8) {}
    // begin(), once, behind the first loads, then body(row, words) for the lane's rows of `count` from x on, in which
    // words of others are 0.
    template <class Begin, class Body>
    __device__ __forceinline__ void for_rows(const Wide* x, int64_t stride, int count, Begin begin, Body body) const {
      forget_origin(stride);
      const Wide* from = x + row * stride + column;
#pragma unroll 1
      for (int first = 0; first < count; first += ROWS * AT_ONCE) {
        uint32_t words[AT_ONCE][4];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u, from += ROWS * stride)
          load_streaming<16>(words[u], from, column < DIM && first + u * ROWS + row < count);
        if (first == 0) begin();
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) body(first + u * ROWS + row, words[u]);
      }
    }
  };
  // The largest magnitude of `count` rows, of those that are numbers.
  template <int DIM, int AT_ONCE>
  __device__ __forceinline__ void look(const Wide* x, int64_t stride, int count, uint32_t* size_gmem, int lane) const {
    const Lanes<DIM, AT_ONCE> lanes(lane);
    uint32_t most = 0;
    lanes.for_rows(
        x, stride, count, [] {},
        [&](int, const uint32_t(&words)[4]) {
#pragma unroll
          for (int w = 0; w < 4; ++w) most = larger2(most, words[w], Wide{});
        });
    float low, high;
    unpack2(most, Wide{}, low, high);
    float size = fmaxf(low, high);
    if (__any_sync(ALL_LANES, !is_number(size))) {
      size = 0.f;
      Lanes<DIM, 1>(lane).for_rows(
          x, stride, count, [] {},
          [&](int, const uint32_t(&words)[4]) {
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
  // The numbers of `count` rows.
  template <int AT_ONCE>
  __device__ __forceinline__ void write(const Wide* x, int64_t stride, int count, uint8_t* numbers,
                                        const uint32_t* words_gmem, int tensor, int lane) const {
    const Lanes<HEAD_DIM, AT_ONCE> lanes(lane);
    float inverse;
    lanes.for_rows(
        x, stride, count, [&] { inverse = inverse_of(words_gmem, tensor, lane); },
        [&](int row, const uint32_t(&words)[4]) {
          Vector<uint32_t, 2> made;
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            float y[4];
            unpack2(words[2 * w], Wide{}, y[0], y[1]), unpack2(words[2 * w + 1], Wide{}, y[2], y[3]);
            made.at[w] = pack4_e4m3(rounded(y[0], inverse), rounded(y[1], inverse), rounded(y[2], inverse),
                                    rounded(y[3], inverse));
          }
          if (lanes.column < HEAD_DIM && row < count) store_global(numbers + row * HEAD_DIM + lanes.column, made);
        });
  }
  // Keys from `first` on, from x on, as numbers of V, [VALUE_DIM, keys rounded up to whole GROUPs, of zeros]: of each
  // group place 4t + e has key 2t + e % 2 + e / 2 · 8. A lane takes two columns of a group.
  __device__ __forceinline__ void turn(const Wide* x, int unit, int first, float inverse, int lane) const {
    constexpr int PAIRS = VALUE_DIM / 2, ITEMS = V_ROWS / GROUP * PAIRS;
    const int padded = (seqlen_k + GROUP - 1) / GROUP * GROUP;
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
