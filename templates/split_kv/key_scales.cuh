// key_scales.cuh: what the numbers of K and V of one warp's keys are multiplied by, where these are of 8 bits.
#include "device/ptx/element.cuh"
#include "device/copy/kv_scales.cuh"
#include "split_kv/warp_keys.cuh"

// Of the lane's keys in the tile that is scored next: Rows::LANE_KEYS of them, number i being row `rows.key_row(i)`.
template <Scales SCALES, class Rows, bool PAGED, int BLOCK_N, int KEYS, bool SMALL_PAGES> struct KeyScales {
  static constexpr bool ANY = false, PER_KEY = false;
  float v_factor = 1.f;
  __device__ __forceinline__ KeyScales(const KvScales&, const WarpKeys&, const Rows&, int) {}
  __device__ __forceinline__ void begin(const WarpKeys&) {}
  __device__ __forceinline__ void load(const WarpKeys&, int) {}
  __device__ __forceinline__ void take(const Rows&) {}
  __device__ __forceinline__ float of_key(int) const { return 1.f; }
};
template <class Rows, bool PAGED, int BLOCK_N, int KEYS, bool SMALL_PAGES>
struct KeyScales<Scales::HEAD, Rows, PAGED, BLOCK_N, KEYS, SMALL_PAGES> {
  static constexpr bool ANY = true, PER_KEY = false;
  float k_factor, v_factor;
  __device__ __forceinline__ KeyScales(const KvScales& given, const WarpKeys& keys, const Rows&, int sequence)
      : k_factor(__ldg(given.k.gmem + sequence * given.k.batch + keys.kv_head * given.k.head)),
        v_factor(__ldg(given.v.gmem + sequence * given.v.batch + keys.kv_head * given.v.head)) {}
  __device__ __forceinline__ void begin(const WarpKeys&) {}
  __device__ __forceinline__ void load(const WarpKeys&, int) {}
  __device__ __forceinline__ void take(const Rows&) {}
  __device__ __forceinline__ float of_key(int) const { return k_factor; }
};
template <class Rows, bool PAGED, int BLOCK_N, int KEYS, bool SMALL_PAGES>
struct KeyScales<Scales::KEY, Rows, PAGED, BLOCK_N, KEYS, SMALL_PAGES> {
  static constexpr bool ANY = true, PER_KEY = true;
  static constexpr int COUNT = Rows::LANE_KEYS, LOADS = (KEYS + 31) / 32;
  float k[COUNT], v[COUNT];  // of the tile at hand, 1 of keys that the warp does not have
  float v_factor = 1.f;
  ScaleSource k_source, v_source;  // from the head's first
  // Of the tile that is loaded next each lane has every 32nd key's, of which one asks and shuffles tell.
  float own_k[LOADS], own_v[LOADS];
  int page[LOADS];
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ KeyScales(const KvScales& given, const WarpKeys& keys, const Rows&, int)
      : k_source(given.k), v_source(given.v) {
    k_source.gmem += keys.kv_head * k_source.head + (PAGED ? 0 : keys.batch * k_source.batch);
    v_source.gmem += keys.kv_head * v_source.head + (PAGED ? 0 : keys.batch * v_source.batch);
  }
  // Asks for those of the first tile, once its keys are asked for: they are needed later.
  __device__ __forceinline__ void begin(const WarpKeys& keys) {
    find_pages(keys, 0);
    load(keys, 0);
  }
  __device__ __forceinline__ bool has(const WarpKeys& keys, int tile, int i) const {
    return i * 32 + lane < KEYS && tile * BLOCK_N + i * 32 + lane < keys.count;
  }
  __device__ __forceinline__ void find_pages(const WarpKeys& keys, int tile) {
#pragma unroll
    for (int i = 0; PAGED && i < LOADS; ++i)
      page[i] = has(keys, tile, i) ? keys.page_of(keys.first + tile * BLOCK_N + i * 32 + lane) : 0;
  }
  __device__ __forceinline__ void load(const WarpKeys& keys, int tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int key = keys.first + tile * BLOCK_N + i * 32 + lane, row = PAGED ? keys.row_in_page(key) : key;
      own_k[i] = own_v[i] = 1.f;
      if (!has(keys, tile, i)) continue;
      own_k[i] = __ldg(k_source.gmem + (PAGED ? page[i] * k_source.batch : 0) + row * k_source.row);
      own_v[i] = __ldg(v_source.gmem + (PAGED ? page[i] * v_source.batch : 0) + row * v_source.row);
    }
    find_pages(keys, tile + 1);
  }
  // Those of the tile that was loaded are of the tile at hand.
  __device__ __forceinline__ void take(const Rows& rows) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      k[i] = __shfl_sync(ALL_LANES, own_k[Rows::key_group(i) / 2], rows.key_row(i) % 32);
      v[i] = fmaxf(__shfl_sync(ALL_LANES, own_v[Rows::key_group(i) / 2], rows.key_row(i) % 32), LEAST_SCALE);
    }
  }
  __device__ __forceinline__ float of_key(int i) const { return k[i]; }
};
