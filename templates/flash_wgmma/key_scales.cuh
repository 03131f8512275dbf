// key_scales.cuh: scales of K and V of each key, by a consumer: a scale of K multiplies a score, and one of V is a part
// of its weight. With l = log2 of it p = 2^(s + l - shift) is what V is weighed with, and p / scale what is summed up.
#include "device/copy/key_pages.cuh"
#include "device/copy/least_scale.cuh"
#include "device/ptx/warp.cuh"
#include "device/softmax/wgmma_softmax.cuh"
#include "flash_wgmma/head_scales.cuh"

// Of scores: the logarithm of any scale by it is finite.
constexpr float LEAST_DIVISOR = 7.5231638e-37f;  // 2^-120

// Of the lane's columns of a tile of keys: 8n + 2t and the next. 1 of keys that there are not. Those of the next tile
// are loaded a tile ahead, by lanes of a warp in turn.
template <int COLUMNS> struct KeyScales {
  static constexpr int LOADS = (4 * COLUMNS + 31) / 32;
  float k[COLUMNS], v[COLUMNS];
  float next_k[LOADS], next_v[LOADS];

  // Of keys from `first` on, of which some may be none. `first_row`: of the sequence, in a batch, where no PAGED table
  // says.
  template <bool PAGED>
  __device__ __forceinline__ void load(const HeadScales& keys, const HeadScales& values, const KeyPages& pages,
                                       int batch, int kv_head, int64_t first_row, int first, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int key = first + i * 32 + lane;
      const bool is_there = key >= 0 && key < pages.keys;
      next_k[i] = next_v[i] = 1.f;
      if (!is_there) continue;
      int64_t page = batch, row = first_row + key;
      if constexpr (PAGED) page = pages.entry_of(key), row = pages.row_in_page(key);
      next_k[i] = of_row(keys, page, kv_head, row);
      next_v[i] = fmaxf(of_row(values, page, kv_head, row), LEAST_SCALE);
    }
  }
  // What was loaded.
  __device__ __forceinline__ void take(int lane) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
      k[i] = __shfl_sync(ALL_LANES, next_k[i / 8], column % 32);
      v[i] = __shfl_sync(ALL_LANES, next_v[i / 8], column % 32);
    }
  }
  template <int FLOATS> __device__ __forceinline__ void scale(float (&s)[FLOATS]) const {
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) s[i] *= k[column(i)];
  }
  // `scale`: that of scores, by which they will be multiplied.
  template <int FLOATS> __device__ __forceinline__ void weigh(float (&s)[FLOATS], float scale) const {
    const float inverse = 1.f / scale;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const float weight = __log2f(v[i]) * inverse;
      s[i / 2 * 4 + i % 2] += weight, s[i / 2 * 4 + i % 2 + 2] += weight;
    }
  }
  // Of the lane's keys, of rows g and g + 8.
  template <int FLOATS> __device__ __forceinline__ void add(float (&sum)[2], const float (&p)[FLOATS]) const {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const float inverse = __fdividef(1.f, v[i]);
      sum[0] = fmaf(p[i / 2 * 4 + i % 2], inverse, sum[0]);
      sum[1] = fmaf(p[i / 2 * 4 + i % 2 + 2], inverse, sum[1]);
    }
  }

private:
  static constexpr __device__ __forceinline__ int column(int i) { return i / 4 * 2 + i % 2; }  // of a score
  static __device__ __forceinline__ float of_row(const HeadScales& from, int64_t page, int kv_head, int64_t row) {
    return __ldg(from.scales + (page * from.batch_stride + kv_head * from.head_stride + row * from.block_stride));
  }
};
