// lane_scales.cuh: the scales of K and V of 8 bits for a tile of scores in mma fragments: of tile n of 8 keys a lane
// has keys 8n + 2t and the next.
#include "device/ptx/element.cuh"
#include "device/copy/key_pages.cuh"
#include "device/copy/kv_scales.cuh"

template <Scales SCALES, int KEY_TILES, bool PAGED> struct LaneScales {
  float k_factor = 1.f, v_factor = 1.f;

  __device__ __forceinline__ LaneScales(const KvScales& given, int sequence, int, int kv_head, int, float) {
    if constexpr (SCALES == Scales::HEAD) {
      k_factor = __ldg(given.k.gmem + sequence * given.k.batch + kv_head * given.k.head);
      v_factor = __ldg(given.v.gmem + sequence * given.v.batch + kv_head * given.v.head);
    }
  }
  __device__ __forceinline__ void load_k(const KeyPages&, int, int) {}
  __device__ __forceinline__ void load_v(const KeyPages&, int, int) {}
  // Scores times the scale of K, and `unit` of rows g and g + 8.
  template <int ROW_TILES>
  __device__ __forceinline__ void scale(float (&s)[ROW_TILES][KEY_TILES][4], const float (&unit)[ROW_TILES][2]) const {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= unit[m][e / 2] * k_factor;
  }
  // Scores with the weight of the scale of V.
  template <int ROW_TILES> __device__ __forceinline__ void weigh(float (&)[ROW_TILES][KEY_TILES][4]) const {}
  // What a weight adds to the sum.
  __device__ __forceinline__ float summed(float p, int, int) const { return p; }
};
template <int KEY_TILES, bool PAGED> struct LaneScales<Scales::KEY, KEY_TILES, PAGED> {
  float k[KEY_TILES][2], v[KEY_TILES][2];  // 1 of keys that there are not
  float v_factor = 1.f;
  ScaleSource k_source, v_source;  // from the head's first key
  const float inverse_softmax_scale;

  __device__ __forceinline__ LaneScales(const KvScales& given, int, int batch, int kv_head, int first_key,
                                        float inverse_softmax_scale)
      : k_source(given.k), v_source(given.v), inverse_softmax_scale(inverse_softmax_scale) {
    k_source.gmem += kv_head * k_source.head + (PAGED ? 0 : batch * k_source.batch + first_key * k_source.row);
    v_source.gmem += kv_head * v_source.head + (PAGED ? 0 : batch * v_source.batch + first_key * v_source.row);
  }
  static __device__ __forceinline__ void load(float (&scales)[KEY_TILES][2], const ScaleSource& source,
                                              const KeyPages& pages, int first, int keys) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = first + n * 8 + e;
        scales[n][e] = 1.f;
        if (key >= keys) continue;
        if constexpr (PAGED) {
          scales[n][e] = __ldg(pages.page_of(source.gmem, key, source.batch) + pages.row_in_page(key) * source.row);
        } else {
          scales[n][e] = __ldg(source.gmem + key * source.row);
        }
      }
  }
  __device__ __forceinline__ void load_k(const KeyPages& pages, int first, int keys) {
    load(k, k_source, pages, first, keys);
  }
  __device__ __forceinline__ void load_v(const KeyPages& pages, int first, int keys) {
    load(v, v_source, pages, first, keys);
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) v[n][0] = fmaxf(v[n][0], LEAST_SCALE), v[n][1] = fmaxf(v[n][1], LEAST_SCALE);
  }
  template <int ROW_TILES>
  __device__ __forceinline__ void scale(float (&s)[ROW_TILES][KEY_TILES][4], const float (&unit)[ROW_TILES][2]) const {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= unit[m][e / 2] * k[n][e % 2];
  }
  template <int ROW_TILES> __device__ __forceinline__ void weigh(float (&s)[ROW_TILES][KEY_TILES][4]) const {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float weight = __log2f(v[n][e]) * inverse_softmax_scale;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) s[m][n][e] += weight, s[m][n][e + 2] += weight;
      }
  }
  __device__ __forceinline__ float summed(float p, int n, int e) const { return __fdividef(p, v[n][e]); }
};
