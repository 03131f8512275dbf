// slice_copy.cuh: ROWS rows of CHUNKS 16-byte chunks from global to shared memory, where they lie STRIDE elements
// apart, by all THREADS of the block. `row_gmem(row)` says where a row begins; it must be a place that can be read,
// whatever the row. Commit and wait for it.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"

template <int ROWS, int CHUNKS, int STRIDE, int THREADS, typename Element, typename Row>
__device__ __forceinline__ void copy_slice(Element* tile_smem,  // [ROWS, STRIDE]
                                           Row row_gmem) {
  constexpr int VECTOR = 16 / sizeof(Element), COUNT = ROWS * CHUNKS;
  constexpr int PASSES = (COUNT + THREADS - 1) / THREADS;
#pragma unroll 8
  for (int pass = 0; pass < PASSES; pass++) {
    const uint32_t i = threadIdx.x + pass * THREADS;
    if (COUNT % THREADS != 0 && i >= COUNT) break;  // only the last pass can be partial
    const int row = i / uint32_t(CHUNKS), chunk = i % uint32_t(CHUNKS);
    cp_async<16>(shared_address(tile_smem + row * STRIDE + chunk * VECTOR), row_gmem(row) + chunk * VECTOR, 16);
  }
}
