// key_scales.cuh: what the numbers of K and V of one warp's keys are multiplied by, where these are of 8 bits.
#include "device/ptx/element.cuh"
#include "device/copy/kv_scales.cuh"
#include "split_kv/warp_keys.cuh"

// Of the lane's keys in the tile that is scored next: Rows::LANE_KEYS of them, number i being row `rows.key_row(i)`.
template <Scales SCALES, class Rows, bool PAGED, int BLOCK_N, int KEYS, bool SMALL_PAGES> struct KeyScales {
  static constexpr bool ANY = false, PER_KEY = false;
  float v_factor = 1.f;
  __device__ __forceinline__ KeyScales(const KvScales&, const WarpKeys&, const Rows&, int) {}
  __device__ __forceinline__ void load(const WarpKeys&, const Rows&, int) {}
  __device__ __forceinline__ float of_key(int) const { return 1.f; }
};
template <class Rows, bool PAGED, int BLOCK_N, int KEYS, bool SMALL_PAGES>
struct KeyScales<Scales::HEAD, Rows, PAGED, BLOCK_N, KEYS, SMALL_PAGES> {
  static constexpr bool ANY = true, PER_KEY = false;
  float k_factor, v_factor;
  __device__ __forceinline__ KeyScales(const KvScales& given, const WarpKeys& keys, const Rows&, int sequence)
      : k_factor(__ldg(given.k.gmem + sequence * given.k.batch + keys.kv_head * given.k.head)),
        v_factor(__ldg(given.v.gmem + sequence * given.v.batch + keys.kv_head * given.v.head)) {}
  __device__ __forceinline__ void load(const WarpKeys&, const Rows&, int) {}
  __device__ __forceinline__ float of_key(int) const { return k_factor; }
};
template <class Rows, bool PAGED, int BLOCK_N, int KEYS, bool SMALL_PAGES>
struct KeyScales<Scales::KEY, Rows, PAGED, BLOCK_N, KEYS, SMALL_PAGES> {
  static constexpr bool ANY = true, PER_KEY = true;
  static constexpr int COUNT = Rows::LANE_KEYS;
  float k[COUNT], v[COUNT];  // 1 of keys that the warp does not have
  float v_factor = 1.f;
  ScaleSource k_source, v_source;  // from the head's first
  // Of the tile that is loaded next.
  TilePages<PAGED ? (SMALL_PAGES ? Place::SMALL_PAGED : Place::PAGED) : Place::DENSE, KEYS> pages;

  __device__ __forceinline__ KeyScales(const KvScales& given, const WarpKeys& keys, const Rows& rows, int)
      : k_source(given.k), v_source(given.v) {
    k_source.gmem += keys.kv_head * k_source.head + (PAGED ? 0 : keys.batch * k_source.batch);
    v_source.gmem += keys.kv_head * v_source.head + (PAGED ? 0 : keys.batch * v_source.batch);
    if (keys.tiles > 0) pages.load(keys, keys.first, rows.k_row());
    load(keys, rows, 0);
  }
  __device__ __forceinline__ void load(const WarpKeys& keys, const Rows& rows, int tile) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = rows.key_row(i), key = keys.first + tile * BLOCK_N + row;
      k[i] = v[i] = 1.f;
      if (tile * BLOCK_N + row >= keys.count) continue;
      int64_t k_at = key * k_source.row, v_at = key * v_source.row;
      if constexpr (PAGED) {
        const int64_t page = pages.page_of(keys, key, 16 * Rows::key_group(i));
        k_at = page * k_source.batch + keys.row_in_page(key) * k_source.row;
        v_at = page * v_source.batch + keys.row_in_page(key) * v_source.row;
      }
      k[i] = __ldg(k_source.gmem + k_at), v[i] = fmaxf(__ldg(v_source.gmem + v_at), LEAST_SCALE);
    }
    if (tile + 1 < keys.tiles) pages.load(keys, keys.first + (tile + 1) * BLOCK_N, rows.k_row());
  }
  __device__ __forceinline__ float of_key(int i) const { return k[i]; }
};
