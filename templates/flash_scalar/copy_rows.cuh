// copy_rows.cuh: a tile of rows from global to shared memory by all THREADS of the block, WIDTH elements per copy. Rows
// from `valid_rows` on are not read and become zeros: stale shared memory could hold a NaN, and 0 · NaN = NaN. Copies
// of 4 bytes and more are asynchronous: commit and wait for them; smaller ones go through registers. A barrier must
// follow.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/copy/vector.cuh"

template <int ROWS, int COLUMNS, int ROW_STRIDE, int WIDTH, int THREADS, typename Element>
__device__ __forceinline__ void copy_rows(
    Element* tile_smem,        // [ROWS, COLUMNS], row stride ROW_STRIDE elements
    const Element* tile_gmem,  // [valid_rows, COLUMNS], row stride `stride_gmem` elements
    int64_t stride_gmem, int valid_rows) {
  constexpr int BYTES = sizeof(Element) * WIDTH;
  constexpr uint32_t CHUNKS = COLUMNS / WIDTH;
  constexpr int PASSES = (ROWS * CHUNKS + THREADS - 1) / THREADS;
  constexpr int UNROLL_PASSES = PASSES <= 8 ? PASSES : 4;  // loads in flight per thread against code size
#pragma unroll UNROLL_PASSES
  for (int pass = 0; pass < PASSES; pass++) {
    const uint32_t i = threadIdx.x + pass * THREADS;
    // With whole rows a pass, a thread keeps its column, and its row moves by a constant.
    const bool whole_rows = THREADS % CHUNKS == 0;
    const int row = whole_rows ? threadIdx.x / CHUNKS + pass * (THREADS / CHUNKS) : i / CHUNKS;
    const int column = (whole_rows ? threadIdx.x % CHUNKS : i % CHUNKS) * WIDTH;
    if (ROWS * CHUNKS % THREADS != 0 && row >= ROWS) break;  // only the last pass can be partial
    const bool valid = row < valid_rows;
    Element* destination_smem = tile_smem + row * ROW_STRIDE + column;
    const Element* source_gmem = tile_gmem + row * stride_gmem + column;
    if constexpr (BYTES >= 4) {
      cp_async<BYTES>(shared_address(destination_smem), source_gmem, valid ? BYTES : 0);
    } else {
      Vector<Element, WIDTH> x = {};
      if (valid) x = load_vector<WIDTH>(source_gmem);
      store_vector(destination_smem, x);
    }
  }
}
