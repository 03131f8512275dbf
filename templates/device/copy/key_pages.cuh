// key_pages.cuh: where the keys of a sequence lie in a cache of pages.
#include "device/ptx/element.cuh"

struct KeyPages {
  const int* table_gmem;       // pages of the sequence, in their order
  int bits, rows_apart, keys;  // a page has 2^bits keys; rows from a page to the next; keys of the sequence in use

  // A page from one of its rows on, for tensor maps that slide: of its `length` rows in use the last lies before row
  // `end`, counted over all pages.
  struct Rows {
    int first, length, end;
  };

  __device__ __forceinline__ int page_keys() const { return 1 << bits; }
  // Where the page of a key in use begins, `head_gmem` being where page 0 does, and which of its rows the key is.
  template <typename T> __device__ __forceinline__ T* page_of(T* head_gmem, int key, int64_t page_stride) const {
    return head_gmem + __ldg(table_gmem + (key >> bits)) * page_stride;
  }
  __device__ __forceinline__ int row_in_page(int key) const { return key & (page_keys() - 1); }
  // The page that has a key; behind the last key in use the table's entries mean nothing.
  __device__ __forceinline__ int entry_of(int key) const { return key < keys ? __ldg(table_gmem + (key >> bits)) : 0; }
  // Of that page, `entry`, from the key on; behind the last key in use `first` is not under `length`.
  __device__ __forceinline__ Rows rows_from(int key, int entry) const {
    const int page = key >> bits, first = key - (page << bits), length = min(page_keys(), keys - (page << bits));
    return {first, length, entry * rows_apart + length};
  }
};
