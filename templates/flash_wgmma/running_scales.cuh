// running_scales.cuh: the scales of numbers of 8 bits that change from tile to tile of keys. The producer, which has
// time, makes what consumers need of those of K and V, and tells it in shared memory with each tile of K.
#include "device/ptx/shared_words.cuh"

// Not 0, by which the -inf of a masked score would be NaN.
__device__ __forceinline__ float not_zero(float scale) { return scale == 0.f ? 1e-30f : scale; }

// Scales that are the same for all rows and keys of a tile of rows: nothing to keep.
struct NoBlockScales {
  static constexpr int WORDS = 0;  // of shared memory, of a tile
  template <class Scales>
  __device__ __forceinline__ void begin_rows(const Scales&, int batch, int head, int row, float unit) {}
  __device__ __forceinline__ void take(uint32_t told_smem, int lane) {}
  __device__ __forceinline__ float of_scores() const { return 1.f; }
  __device__ __forceinline__ float of_values() const { return 1.f; }
  __device__ __forceinline__ float take_unit() { return 1.f; }
  float change;
};
struct NoScalesAhead {
  template <class Scales>
  __device__ __forceinline__ void begin_rows(const Scales&, int batch, int kv_head, int first_key) {}
  template <class Scales> __device__ __forceinline__ void tell(const Scales&, uint32_t told_smem, int key_before) {}
};

// Scales of blocks of ROWS rows, by a consumer warpgroup. O is added up in units of the last tile's scale of V, so that
// another scale costs no more than a product with the factor by which O is rescaled anyway.
template <int ROWS> struct BlockScales {
  static constexpr int WORDS = 4;
  float row, key, unit;
  float change;  // by which O must be multiplied before P V of this tile is added

  template <class Scales>
  __device__ __forceinline__ void begin_rows(const Scales& scales, int batch, int head, int first,
                                             float softmax_scale) {
    row = scales.of_query_block(batch, head, first / ROWS) * softmax_scale;
  }
  // Once the tile's K is there.
  __device__ __forceinline__ void take(uint32_t told_smem, int lane) {
    int words[3];
    read_shared_words(told_smem, lane, words);
    key = __int_as_float(words[0]), change = __int_as_float(words[1]), unit = __int_as_float(words[2]);
  }
  __device__ __forceinline__ float of_scores() const { return not_zero(row * key); }
  __device__ __forceinline__ float of_values() const { return unit; }
  // The unit of O, which is multiplied by it: it has none then.
  __device__ __forceinline__ float take_unit() {
    const float taken = unit;
    unit = 1.f;
    return taken;
  }
};
// By the producer. A scale of V below 2^-60 of the largest so far counts as that: its numbers are less than fp32 keeps
// beside those of the largest.
template <int ROWS> struct BlockScalesAhead {
  static constexpr float LEAST = 1.17549435e-38f, LEAST_STEP = 8.6736174e-19f;  // whose inverse is a number; 2^-60
  float unit, least;
  float key, value;             // of the next tile: loads in the tile that takes them would be waited for
  int first_keys, first_value;  // where those of the head begin

  template <class Scales>
  __device__ __forceinline__ void begin_rows(const Scales& scales, int batch, int kv_head, int first_key) {
    first_keys = scales.k.of_head(batch, kv_head), first_value = scales.v.of_head(batch, kv_head);
    unit = 0.f, least = LEAST;
    load(scales, first_key);
  }
  // Of the next tile; the one after it begins at `key_before`.
  template <class Scales>
  __device__ __forceinline__ void tell(const Scales& scales, uint32_t told_smem, int key_before) {
    const float before = unit;
    least = fmaxf(least, value * LEAST_STEP), unit = fmaxf(value, least);
    const float told[3] = {key, __fdividef(before, unit), unit};
#pragma unroll
    for (int i = 0; i < 3; ++i) write_shared_word(told_smem + 4 * i, __float_as_int(told[i]));
    load(scales, key_before);
  }

private:
  template <class Scales> __device__ __forceinline__ void load(const Scales& scales, int first_key) {
    const int block = max(0, first_key) / ROWS;
    key = scales.k.of_block(first_keys, block), value = scales.v.of_block(first_value, block);
  }
};
template <bool OF_BLOCKS, int ROWS> struct RunningScales {
  using Type = NoBlockScales;
  using Ahead = NoScalesAhead;
};
template <int ROWS> struct RunningScales<true, ROWS> {
  using Type = BlockScales<ROWS>;
  using Ahead = BlockScalesAhead<ROWS>;
};
