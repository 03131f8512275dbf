// chunk_copy.cuh: a piece of a tile, ROWS rows of CHUNKS 16-byte chunks, from global to shared memory by all THREADS of
// the block with cp.async. A thread keeps to one 16-byte column and takes every ROWS_PER_PASS-th row, so that a row
// costs it one addition; where CHUNKS does not divide THREADS the last threads idle.
#include "device/ptx/element.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/copy/swizzle.cuh"

template <typename Layout, int ROWS, int CHUNKS, int THREADS> struct ChunkCopy {
  static constexpr int ROWS_PER_PASS = THREADS / CHUNKS;
  static constexpr int PASSES = (ROWS + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
  static_assert(ROWS_PER_PASS > 0, "a pass copies whole rows");

  // Where this thread begins in a piece that begins at `piece_gmem` [*, row_stride] of 16-bit elements.
  template <typename Element>
  static __device__ __forceinline__ const Element* thread_source(const Element* piece_gmem, int64_t row_stride) {
    return piece_gmem + int(threadIdx.x) / CHUNKS * row_stride + int(threadIdx.x) % CHUNKS * 8;
  }
  // `thread_gmem` is from `thread_source`. Rows from `valid_rows` on and chunks from `valid_chunks` on are not read and
  // become zeros: what lay there could be a NaN, and 0 · NaN = NaN.
  template <typename Element>
  static __device__ __forceinline__ void copy(uint32_t piece_smem, const Element* thread_gmem, int64_t row_stride,
                                              int valid_rows, int valid_chunks) {
    const int first_row = int(threadIdx.x) / CHUNKS, chunk = int(threadIdx.x) % CHUNKS;
    if (THREADS % CHUNKS != 0 && first_row >= ROWS_PER_PASS) return;
    if (chunk >= valid_chunks) valid_rows = 0;
#pragma unroll 8  // all passes but of large pieces, which would need a register for every address
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = first_row + pass * ROWS_PER_PASS;
      if (ROWS % ROWS_PER_PASS == 0 || pass < PASSES - 1 || row < ROWS) {
        cp_async<16>(piece_smem + Layout::offset(row, chunk), thread_gmem, row < valid_rows ? 16 : 0);
      }
      thread_gmem += ROWS_PER_PASS * row_stride;
    }
  }
};
