// running_scales.cuh: the scales of numbers of 8 bits that a consumer warpgroup keeps from tile to tile.

// Scales that are the same for all rows and keys of a tile of rows: nothing to keep.
struct NoBlockScales {
  template <class Scales>
  __device__ __forceinline__ void begin_rows(const Scales&, int batch, int head, int kv_head, int row, int rows,
                                             float unit) {}
  template <bool FIRST, class Scales>
  __device__ __forceinline__ void load(const Scales&, int key, int key_before, int keys) {}
  __device__ __forceinline__ float of_scores() const { return 1.f; }
  template <bool FIRST> __device__ __forceinline__ float change() { return 1.f; }
  __device__ __forceinline__ float of_values() const { return 1.f; }
  __device__ __forceinline__ float take_unit() { return 1.f; }
};

// Not 0, by which the -inf of a masked score would be NaN.
__device__ __forceinline__ float not_zero(float scale) { return scale == 0.f ? 1e-30f : scale; }

// Scales of blocks of ROWS rows, of a tile of rows and keys. O is added up in units of the last tile's scale of V, so
// that another scale costs no more than a product with the factor by which O is rescaled anyway. A scale below 2^-60 of
// the largest so far counts as that: its numbers are less than fp32 keeps beside those of the largest.
template <int ROWS> struct BlockScales {
  static constexpr float LEAST = 1.17549435e-38f, LEAST_STEP = 8.6736174e-19f;  // whose inverse is a number; 2^-60
  float row, key, value, unit, least;
  float next_key, next_value;   // of the next tile: loads in the tile that takes them would be waited for
  int first_keys, first_value;  // where those of the head begin

  static __device__ __forceinline__ int block_of(int row, int rows) { return max(0, min(row, rows - 1)) / ROWS; }
  template <class Scales>
  __device__ __forceinline__ void begin_rows(const Scales& scales, int batch, int head, int kv_head, int first,
                                             int rows, float softmax_scale) {
    row = scales.of_query_block(batch, head, block_of(first, rows)) * softmax_scale;
    first_keys = scales.k.of_head(batch, kv_head), first_value = scales.v.of_head(batch, kv_head);
  }
  // Of the tile from `first_key` on; the next begins at `key_before`.
  template <bool FIRST, class Scales>
  __device__ __forceinline__ void load(const Scales& scales, int first_key, int key_before, int keys) {
    auto load_next = [&](int block) {
      next_key = scales.k.of_block(first_keys, block), next_value = scales.v.of_block(first_value, block);
    };
    if constexpr (FIRST) load_next(block_of(first_key, keys));
    key = next_key, value = next_value;
    load_next(block_of(key_before, keys));
  }
  __device__ __forceinline__ float of_scores() const { return not_zero(row * key); }
  // By which O must be multiplied before P V of the loaded keys is added.
  template <bool FIRST> __device__ __forceinline__ float change() {
    const float before = unit;
    least = fmaxf(FIRST ? LEAST : least, value * LEAST_STEP), unit = fmaxf(value, least);
    return FIRST ? 1.f : __fdividef(before, unit);
  }
  __device__ __forceinline__ float of_values() const { return unit; }
  // The unit of O, which is multiplied by it: it has none then.
  __device__ __forceinline__ float take_unit() {
    const float taken = unit;
    unit = 1.f;
    return taken;
  }
};
template <bool OF_BLOCKS, int ROWS> struct RunningScales {
  using Type = NoBlockScales;
};
template <int ROWS> struct RunningScales<true, ROWS> {
  using Type = BlockScales<ROWS>;
};
