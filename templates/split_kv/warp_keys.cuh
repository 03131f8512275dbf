// warp_keys.cuh: the keys that one warp of split_kv takes, in tiles, and where in memory their rows are. What brings
// their K and V to the warp is the struct `KeyTiles` of one of the headers kv_registers, kv_cp_async, kv_tma.
#include "device/ptx/element.cuh"

enum class Place {
  DENSE,        // of a sequence end to end
  PAGED,        // in pages, of which a table says which
  SMALL_PAGED,  // in pages of fewer than 16 keys
  LISTED,       // in tiles that a list names
};

constexpr int LIST_GRANULE = 16;  // LISTED: blocks are multiples of so many keys, and tiles multiples or parts
using ListedKeys = ListedTiles<LIST_GRANULE>;

struct KvStrides {
  int64_t batch, head, row;
};  // elements

struct WarpKeys {
  int batch, kv_head;
  KvStrides k_strides, v_strides;
  int first, count;  // key `first` begins the first tile; those from `first + count` on are not seen
  int tiles;
  ListedKeys listed;      // LISTED: `first` counts in its blocks
  int end;                // LISTED: of the sequence
  const int* pages_gmem;  // PAGED: of the sequence, in their order; a batch of K and V is then a page
  int page_bits;          // PAGED: a page has 2^page_bits keys

  // PAGED: the page of key `key`, or of the last one that is seen: entries behind it mean nothing.
  __device__ __forceinline__ int page_of(int key) const {
    return __ldg(pages_gmem + (min(key, first + count - 1) >> page_bits));
  }
  __device__ __forceinline__ int row_in_page(int key) const { return key & ((1 << page_bits) - 1); }
  // LISTED: the key of the sequence that counts as key `key`.
  __device__ __forceinline__ int listed_key(int key) const {
    return listed.first_key(key / LIST_GRANULE) + key % LIST_GRANULE;
  }
};

// Where the rows of one tile are that a lane copies, and how many of it there are: `left` of all. PAGED: 16 keys from a
// multiple of 16 on, or the KEYS of a warp's tile if they are fewer, lie in one page, and no lane's rows of such a
// group begin in another one. SMALL_PAGED: each row looks its page up.
template <Place, int KEYS> struct TilePages {
  // `first_key`: of the tile. It must be one of the warp's keys.
  __device__ __forceinline__ void load(const WarpKeys&, int first_key, int lane_row) {}
  __device__ __forceinline__ int left(const WarpKeys&, int of_all) const { return of_all; }
  // Of a key `offset` rows behind the lane's first; of none where there are no keys, whose rows are asked for too.
  __device__ __forceinline__ int page_of(const WarpKeys& keys, int key, int offset) const {
    return keys.count > 0 ? keys.page_of(key) : 0;
  }
};
template <int KEYS> struct TilePages<Place::LISTED, KEYS> {
  int key;

  __device__ __forceinline__ void load(const WarpKeys& keys, int first_key, int) { key = keys.listed_key(first_key); }
  __device__ __forceinline__ int left(const WarpKeys& keys, int) const { return keys.end - key; }
};
template <int KEYS> struct TilePages<Place::PAGED, KEYS> {
  int of_group[(KEYS + 15) / 16];

  __device__ __forceinline__ int page_of(const WarpKeys&, int key, int offset) const { return of_group[offset / 16]; }

  __device__ __forceinline__ void load(const WarpKeys& keys, int first_key, int lane_row) {
#pragma unroll
    for (int n = 0; n < (KEYS + 15) / 16; ++n) of_group[n] = keys.page_of(first_key + lane_row / 16 * 16 + n * 16);
  }
  __device__ __forceinline__ int left(const WarpKeys&, int of_all) const { return of_all; }
};

// A lane's rows of K or of V in the tile that is copied next: its first is row `row` of the tile, from `column` on.
template <typename Element, Place PLACE> struct LaneRows {
  const Element* next_gmem;
  int64_t stride;

  __device__ __forceinline__ LaneRows(const Element* kv_gmem, const WarpKeys& keys, const KvStrides& strides, int row,
                                      int column)
      : next_gmem(kv_gmem + keys.batch * strides.batch + keys.kv_head * strides.head +
                  (keys.first + row) * strides.row + column),
        stride(strides.row) {}
  // Where the row `offset` rows behind the lane's first is.
  template <class Pages> __device__ __forceinline__ const Element* at(int offset, const WarpKeys&, const Pages&) const {
    return next_gmem + offset * stride;
  }
  __device__ __forceinline__ void next_tile(int rows) { next_gmem += rows * stride; }
};
template <typename Element> struct LaneRows<Element, Place::LISTED> {
  const Element* first_gmem;  // of the sequence
  int64_t stride;

  __device__ __forceinline__ LaneRows(const Element* kv_gmem, const WarpKeys& keys, const KvStrides& strides, int row,
                                      int column)
      : first_gmem(kv_gmem + keys.batch * strides.batch + keys.kv_head * strides.head + row * strides.row + column),
        stride(strides.row) {}
  template <class Pages>
  __device__ __forceinline__ const Element* at(int offset, const WarpKeys&, const Pages& pages) const {
    return first_gmem + (pages.key + offset) * stride;
  }
  __device__ __forceinline__ void next_tile(int) {}
};
template <typename Element> struct PagedRows {
  const Element* head_gmem;
  int64_t page_stride, stride;
  int key;

  __device__ __forceinline__ PagedRows(const Element* kv_gmem, const WarpKeys& keys, const KvStrides& strides, int row,
                                       int column)
      : head_gmem(kv_gmem + keys.kv_head * strides.head + column),
        page_stride(strides.batch),
        stride(strides.row),
        key(keys.first + row) {}
  template <class Pages>
  __device__ __forceinline__ const Element* at(int offset, const WarpKeys& keys, const Pages& pages) const {
    return head_gmem + pages.page_of(keys, key + offset, offset) * page_stride +
           keys.row_in_page(key + offset) * stride;
  }
  __device__ __forceinline__ void next_tile(int rows) { key += rows; }
};
template <typename Element> struct LaneRows<Element, Place::PAGED> : PagedRows<Element> {
  using PagedRows<Element>::PagedRows;
};
template <typename Element> struct LaneRows<Element, Place::SMALL_PAGED> : PagedRows<Element> {
  using PagedRows<Element>::PagedRows;
};
