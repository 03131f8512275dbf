// tile_copy.cuh: a tile of rows from global to shared memory by all threads of the block with 16-byte cp.async.
#include "device/ptx/element.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/copy/swizzle.cuh"
#include "device/copy/key_pages.cuh"

// A thread keeps to one 16-byte column of the tile and takes every ROWS_PER_PASS-th row, so that a row costs it one
// addition; where CHUNKS does not divide THREADS the last threads idle. ELEMENT_CHUNKS = real chunks per row (the
// layout's padding chunk is not written).
template <typename Layout, int ROWS, int ELEMENT_CHUNKS, int THREADS> struct TileCopy {
  static constexpr int ROWS_PER_PASS = THREADS / ELEMENT_CHUNKS;
  static constexpr int PASSES = (ROWS + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
  static_assert(ROWS_PER_PASS > 0, "a pass copies whole rows");

  // Where this thread begins in a tile [*, row_stride] .
  template <typename Element>
  static __device__ __forceinline__ const Element* thread_source(const Element* tile_gmem, int64_t row_stride) {
    return tile_gmem + int(threadIdx.x) / ELEMENT_CHUNKS * row_stride +
           int(threadIdx.x) % ELEMENT_CHUNKS * (16 / int(sizeof(Element)));
  }
  // `thread_gmem` is from `thread_source`. Rows from `valid_rows` on and chunks from `valid_chunks` on are not read and
  // become zeros: what lay there could be a NaN, and 0 · NaN = NaN.
  template <typename Element>
  static __device__ __forceinline__ void copy(uint32_t tile_smem, const Element* thread_gmem, int64_t row_stride,
                                              int valid_rows, int valid_chunks = ELEMENT_CHUNKS) {
    const int first_row = int(threadIdx.x) / ELEMENT_CHUNKS, chunk = int(threadIdx.x) % ELEMENT_CHUNKS;
    if (THREADS % ELEMENT_CHUNKS != 0 && first_row >= ROWS_PER_PASS) return;
    if (chunk >= valid_chunks) valid_rows = 0;
#pragma unroll 8  // all passes but of large tiles or in the smallest blocks, which would need a register for every
                  // address
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = first_row + pass * ROWS_PER_PASS;
      if (ROWS % ROWS_PER_PASS == 0 || pass < PASSES - 1 || row < ROWS) {
        cp_async<16>(tile_smem + Layout::offset(row, chunk), thread_gmem, row < valid_rows ? 16 : 0);
      }
      thread_gmem += ROWS_PER_PASS * row_stride;
    }
  }
  // The same of a sequence in pages, from key `first_key` on: `head_gmem` is where page 0 begins.
  template <typename Element>
  static __device__ __forceinline__ void copy_pages(uint32_t tile_smem, const Element* head_gmem, int64_t page_stride,
                                                    int64_t row_stride, const KeyPages& pages, int first_key) {
    const int first_row = int(threadIdx.x) / ELEMENT_CHUNKS, chunk = int(threadIdx.x) % ELEMENT_CHUNKS;
    if (THREADS % ELEMENT_CHUNKS != 0 && first_row >= ROWS_PER_PASS) return;
#pragma unroll 8
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = first_row + pass * ROWS_PER_PASS, key = first_key + row;
      if (ROWS % ROWS_PER_PASS == 0 || pass < PASSES - 1 || row < ROWS) {
        const bool valid = key < pages.keys;  // else there is no page to look up
        const Element* page_gmem = valid ? pages.page_of(head_gmem, key, page_stride) : head_gmem;
        cp_async<16>(tile_smem + Layout::offset(row, chunk),
                     page_gmem + pages.row_in_page(key) * row_stride + chunk * (16 / int(sizeof(Element))),
                     valid ? 16 : 0);
      }
    }
  }
};
