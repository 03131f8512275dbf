// key_pages.cuh: where the keys of a sequence lie in a cache of pages, whose rows are counted over all pages, for
// tensor maps that slide.
#include "device/ptx/element.cuh"

struct KeyPages {
  const int* table_gmem;       // pages of the sequence, in their order
  int bits, rows_apart, keys;  // a page has 2^bits keys; rows from a page to the next; keys of the sequence in use

  // A page from one of its rows on: of its `length` rows in use the last lies before row `end`.
  struct Rows {
    int first, length, end;
  };

  __device__ __forceinline__ int page_keys() const { return 1 << bits; }
  // Behind the last key in use there are no rows, and the table's entries mean nothing.
  __device__ __forceinline__ Rows rows_from(int key) const {
    if (key >= keys) return {0, 0, 0};
    const int page = key >> bits, first = key - (page << bits), length = min(page_keys(), keys - (page << bits));
    return {first, length, __ldg(table_gmem + page) * rows_apart + length};
  }
};
