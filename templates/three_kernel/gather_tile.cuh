// gather_tile.cuh: a tile of 16-bit elements from global to shared memory by all threads of the block with 16-byte
// cp.async, chunks FIRST to LAST - 1 of its rows. Row r of the tile is row source_row(r) in memory.
#include "device/ptx/element.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/copy/swizzle.cuh"

// Rows from `valid_rows` and chunks from `valid_chunks` on are not read and become zeros: what lay there could be a
// NaN, and 0 · NaN = NaN.
template <typename Layout, int ROWS, int FIRST, int LAST, int THREADS, typename Element, typename SourceRow>
__device__ __forceinline__ void gather_tile(
    uint32_t tile_smem,
    const Element* tile_gmem,  // [valid_rows, 8 · valid_chunks], rows row_stride apart
    int64_t row_stride, int valid_rows, int valid_chunks, SourceRow source_row) {
  constexpr int CHUNKS = LAST - FIRST, PASSES = (ROWS * CHUNKS + THREADS - 1) / THREADS;
#pragma unroll 4  // copies whose addresses are worked out together
  for (int pass = 0; pass < PASSES; ++pass) {
    const int i = threadIdx.x + pass * THREADS, row = i / CHUNKS, chunk = FIRST + i % CHUNKS;
    if (ROWS * CHUNKS % THREADS != 0 && row >= ROWS) break;
    const int from = source_row(row);
    const bool valid = from < valid_rows && chunk < valid_chunks;
    // Never past the tensor, even unread.
    const Element* source_gmem = tile_gmem + (valid ? from * row_stride + chunk * 8 : 0);
    cp_async<16>(tile_smem + Layout::offset(row, chunk), source_gmem, valid ? 16 : 0);
  }
}
