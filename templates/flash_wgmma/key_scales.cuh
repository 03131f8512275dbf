// key_scales.cuh: scales of K and V of each key, by a consumer: a scale of K multiplies a score, and one of V is a part
// of its weight. With l = log2 of it p = 2^(s + l - shift) is what V is weighed with, and p / scale what is summed up.
#include "device/copy/key_pages.cuh"
#include "device/copy/least_scale.cuh"
#include "device/ptx/warp.cuh"
#include "device/softmax/wgmma_softmax.cuh"
#include "flash_wgmma/head_scales.cuh"

// Of scores: the logarithm of any scale by it is finite.
constexpr float LEAST_DIVISOR = 7.5231638e-37f;  // 2^-120

// Of a tile of keys, in shared memory of the warpgroup's own: scales of K, logarithms of V's, and their inverses. 1 of
// keys that there are not. A thread has one key, which it loads a tile ahead.
template <int KEYS> struct KeyScales {
  static constexpr int BYTES = 3 * 4 * KEYS;
  float next_k, next_v;
  bool is_odd = false;  // the tile at hand: another may be read yet

  // Of key `first` + `thread`. `first_row`: of the sequence, in a batch, where no PAGED table says.
  template <bool PAGED>
  __device__ __forceinline__ void load(const HeadScales& keys, const HeadScales& values, const KeyPages& pages,
                                       int batch, int kv_head, int64_t first_row, int first, int thread) {
    static_assert(KEYS <= 128, "a thread for each key");
    const int key = first + thread;
    next_k = next_v = 1.f;
    if (key < 0 || key >= pages.keys || thread >= KEYS) return;
    int64_t page = batch, row = first_row + key;
    if constexpr (PAGED) page = pages.entry_of(key), row = pages.row_in_page(key);
    next_k = of_row(keys, page, kv_head, row);
    next_v = fmaxf(of_row(values, page, kv_head, row), LEAST_SCALE);
  }
  // What was loaded. All threads of the warpgroup `meet`: each reads next what others have written.
  template <typename Meet> __device__ __forceinline__ void take(float* places, int thread, Meet meet) {
    is_odd = !is_odd;
    float* place = at_hand(places);
    if (thread < KEYS) {
      float* both = place + thread / 2 * 4 + thread % 2;
      both[0] = next_k, both[2] = __log2f(next_v), place[2 * KEYS + thread] = __fdividef(1.f, next_v);
    }
    meet();
  }
  // Of two places: of each pair of keys the scales of K and the logarithms, then all inverses.
  __device__ __forceinline__ float* at_hand(float* places) const { return places + is_odd * 3 * KEYS; }
  // S with its scales, and with what V's are of a weight. `scale`: that of scores, by which they will be multiplied.
  template <bool SCALES, bool WEIGHS, int FLOATS>
  static __device__ __forceinline__ void change(float (&s)[FLOATS], const float* place, float scale, int lane) {
    const float unit = WEIGHS ? 1.f / scale : 0.f;
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4) {
      const float4 of =
          reinterpret_cast<const float4*>(place)[i + lane % 4];  // of keys 2 i + 2 (lane % 4) and the next
#pragma unroll
      for (int j = i; j < i + 4; j += 2) {
        s[j] = fmaf(s[j], SCALES ? of.x : 1.f, WEIGHS ? of.z * unit : 0.f);
        s[j + 1] = fmaf(s[j + 1], SCALES ? of.y : 1.f, WEIGHS ? of.w * unit : 0.f);
      }
    }
  }
  // Weights without V's part, of rows g and g + 8.
  template <int FLOATS>
  static __device__ __forceinline__ void add(float (&sum)[2], const float (&p)[FLOATS], const float* place, int lane) {
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4) {
      const float2 inverse = reinterpret_cast<const float2*>(place + 2 * KEYS)[i + lane % 4];
#pragma unroll
      for (int row = 0; row < 2; ++row)
        sum[row] = fmaf(p[i + 2 * row], inverse.x, fmaf(p[i + 2 * row + 1], inverse.y, sum[row]));
    }
  }

private:
  static __device__ __forceinline__ float of_row(const HeadScales& from, int64_t page, int kv_head, int64_t row) {
    return __ldg(from.scales + (page * from.batch_stride + kv_head * from.head_stride + row * from.block_stride));
  }
};
