// key_scales.cuh: scales of K and V of each key, by a consumer: a scale of K multiplies a score, and one of V is a part
// of its weight. With l = log2 of it p = 2^(s + l - shift) is what V is weighed with, and p / scale what is summed up.
#include "device/copy/key_pages.cuh"
#include "device/copy/least_scale.cuh"
#include "device/ptx/warp.cuh"
#include "device/softmax/wgmma_softmax.cuh"
#include "flash_wgmma/head_scales.cuh"

// Of scores: the logarithm of any scale by it is finite.
constexpr float LEAST_DIVISOR = 7.5231638e-37f;  // 2^-120

// Of a tile of keys, in shared memory of the warp's own: scales of K, what V's add to scores, and the inverses of V's.
// 1 of keys that there are not. Those of the next tile are loaded a tile ahead, by lanes in turn.
template <int KEYS> struct KeyScales {
  static constexpr int LOADS = (KEYS + 31) / 32, BYTES = 3 * 4 * KEYS;
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
  // What was loaded, into the warp's `place`. `scale`: that of scores, by which they will be multiplied.
  __device__ __forceinline__ void take(float* place, float scale, int lane) const {
    const float inverse = 1.f / scale;
    __syncwarp();  // all lanes have read those of the tile before
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int key = i * 32 + lane;
      if (KEYS % 32 > 0 && key >= KEYS) continue;
      place[key] = next_k[i], place[KEYS + key] = __log2f(next_v[i]) * inverse;
      place[2 * KEYS + key] = __fdividef(1.f, next_v[i]);
    }
    __syncwarp();
  }
  // S with its scales, and with what V's are of a weight.
  template <bool SCALES, bool WEIGHS, int FLOATS>
  static __device__ __forceinline__ void change(float (&s)[FLOATS], const float* place, int lane) {
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4) {
      const float2 k = SCALES ? pair(place, i, lane) : float2{1.f, 1.f},
                   more = WEIGHS ? pair(place + KEYS, i, lane) : float2{};
#pragma unroll
      for (int row = 0; row < 4; row += 2)
        s[i + row] = fmaf(s[i + row], k.x, more.x), s[i + row + 1] = fmaf(s[i + row + 1], k.y, more.y);
    }
  }
  // Weights without V's part, of rows g and g + 8.
  template <int FLOATS>
  static __device__ __forceinline__ void add(float (&sum)[2], const float (&p)[FLOATS], const float* place, int lane) {
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4) {
      const float2 inverse = pair(place + 2 * KEYS, i, lane);
#pragma unroll
      for (int row = 0; row < 2; ++row)
        sum[row] = fmaf(p[i + 2 * row], inverse.x, fmaf(p[i + 2 * row + 1], inverse.y, sum[row]));
    }
  }

private:
  // Of the keys of scores i and i + 1 of a lane.
  static __device__ __forceinline__ float2 pair(const float* of, int i, int lane) {
    return *reinterpret_cast<const float2*>(of + i * 2 + lane % 4 * 2);
  }
  static __device__ __forceinline__ float of_row(const HeadScales& from, int64_t page, int kv_head, int64_t row) {
    return __ldg(from.scales + (page * from.batch_stride + kv_head * from.head_stride + row * from.block_stride));
  }
};
