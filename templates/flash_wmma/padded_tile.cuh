// padded_tile.cuh: a tile of rows of 16-bit elements from global to shared memory by all THREADS of the block, 16 bytes
// at a time. CHUNKS of 16 bytes per row, of which memory has VALID_CHUNKS; rows are ROW_BYTES apart in shared memory.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"

// Rows from `valid_rows` on and the chunks that memory has not become zeros: what lay there could be a NaN, and 0 · NaN
// = NaN. ASYNC copies must be committed and waited for; the others pass through registers, several in flight. A barrier
// must follow either.
template <bool ASYNC, int ROWS, int ROW_BYTES, int CHUNKS, int VALID_CHUNKS, int THREADS, typename Element>
__device__ __forceinline__ void padded_tile(unsigned char* tile_smem, const Element* tile_gmem, int64_t row_stride,
                                            int valid_rows) {
  constexpr int PASSES = (ROWS * CHUNKS + THREADS - 1) / THREADS;
#pragma unroll 4  // loads in flight
  for (int pass = 0; pass < PASSES; ++pass) {
    const int i = threadIdx.x + pass * THREADS, row = i / CHUNKS, chunk = i % CHUNKS;
    if (ROWS * CHUNKS % THREADS != 0 && row >= ROWS) break;
    const bool valid = row < valid_rows && chunk < VALID_CHUNKS;
    // Never past the tensor, even unread.
    const Element* source_gmem = tile_gmem + (valid ? row * row_stride + chunk * 8 : 0);
    unsigned char* destination_smem = tile_smem + row * ROW_BYTES + chunk * 16;
    if constexpr (ASYNC) {
      cp_async<16>(shared_address(destination_smem), source_gmem, valid ? 16 : 0);
    } else {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (valid) x = *reinterpret_cast<const uint4*>(source_gmem);
      *reinterpret_cast<uint4*>(destination_smem) = x;
    }
  }
}
