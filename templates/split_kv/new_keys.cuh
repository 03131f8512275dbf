// new_keys.cuh: APPENDED: of the new keys and values of a sequence a block writes those of its own split into the
// caches, before any of its warps reads them. Splits share no key, and one tile has all rows of a K/V head, so that no
// other block reads or writes these.
#include "device/copy/vector.cuh"
#include "device/ptx/tma.cuh"
#include "split_kv/warp_keys.cuh"

template <typename Element> struct NewKeys {
  const Element *k, *v;        // [batch, kv_heads, new keys, HEAD_DIM]
  Element *k_cache, *v_cache;  // what K and V are read from
  KvStrides from;              // of both
  int pages;                   // that the caches have: others are not written
};

// Keys `first` to `end` of a sequence, of which key `before` is its first new one. BY_MAP: tensor maps read them.
template <int HEAD_DIM, bool IN_PAGES, bool BY_MAP, typename Element>
__device__ __forceinline__ void write_new_keys(const NewKeys<Element>& given, const WarpKeys& keys, int before,
                                               int first, int end, int threads) {
  constexpr int WIDTH = 16 / sizeof(Element), VECTORS = HEAD_DIM / WIDTH;
  first = max(first, max(before, 0));
  for (int i = threadIdx.x; i < (end - first) * VECTORS; i += threads) {
    const int key = first + i / VECTORS, column = i % VECTORS * WIDTH;
    int at = keys.batch, row = key;
    if constexpr (IN_PAGES) {
      at = __ldg(keys.pages_gmem + (key >> keys.page_bits)), row = keys.row_in_page(key);
      if (at < 0 || at >= given.pages) continue;
    }
    const int64_t from =
        keys.batch * given.from.batch + keys.kv_head * given.from.head + (key - before) * given.from.row + column;
    const auto write = [&](const Element* rows, Element* cache, const KvStrides& strides) {
      store_vector(cache + at * strides.batch + keys.kv_head * strides.head + row * strides.row + column,
                   load_vector<WIDTH>(rows + from));
    };
    write(given.k, given.k_cache, keys.k_strides), write(given.v, given.v_cache, keys.v_strides);
  }
  if constexpr (BY_MAP) {  // the copy engine reads global memory past this SM's cache
    __threadfence();
    fence_proxy_async_all();
  }
  __syncthreads();  // warps read keys that others have written
}
