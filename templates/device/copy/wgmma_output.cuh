// wgmma_output.cuh: O of a warpgroup from wgmma's accumulators to memory (in the fragment order of wgmma_softmax.cuh).
#include "device/ptx/element.cuh"
#include "device/ptx/stmatrix.cuh"

enum class Store {
  TENSOR_MAP,  // through shared memory, one bulk copy per warpgroup
  ROWS,        // through shared memory, each warp its own rows in 16-byte stores
  CHUNKS,  // as TENSOR_MAP, but 64 columns at a time by way of two places, where a whole tile of O does not fit beside
           // Q
};

// O · inverse into `o_smem`: 64 rows in 64-column chunks of 128-byte rows with the 128-byte swizzle, as a tensor map
// expects them. Of O the n8 tiles from `first_tile`, a chunk's first, to `end_tile` - 1: constants, as registers have
// no index. `warp` of the warpgroup.
template <typename Element, int FLOATS>
__device__ __forceinline__ void output_to_shared(const float (&o)[FLOATS], const float (&inverse)[2], uint32_t o_smem,
                                                 int warp, int lane, int first_tile = 0, int end_tile = FLOATS / 4) {
  constexpr int CHUNK_BYTES = 64 * 128;
  const int row = warp * 16 + lane % 16;
  auto pair = [&](int i) { return pack2<Element>(o[i] * inverse[i / 2 % 2], o[i + 1] * inverse[i / 2 % 2]); };
#pragma unroll
  for (int tile = first_tile; tile < end_tile; tile += 2) {
    const int column = (tile % 8 + lane / 16) ^ (row % 8);  // of 16 bytes, in the chunk
    const uint32_t address = o_smem + (tile - first_tile) / 8 * CHUNK_BYTES + row * 128 + column * 16;
    if (tile + 1 < end_tile)
      stmatrix_x4(address, pair(4 * tile), pair(4 * tile + 2), pair(4 * tile + 4), pair(4 * tile + 6));
    else stmatrix_x2(address, pair(4 * tile), pair(4 * tile + 2));
  }
}

// The warp's 16 rows of HEAD_DIM columns, as `output_to_shared` left them in `tile_smem`, to global memory, 16 bytes a
// lane at a time. `row_gmem` is the first of them, `valid_rows` count from it. The tile has CHUNK_ROWS rows.
template <int HEAD_DIM, int CHUNK_ROWS = 64, typename Element>
__device__ __forceinline__ void rows_to_global(const unsigned char* tile_smem, Element* row_gmem, int64_t row_stride,
                                               int valid_rows, int warp, int lane) {
  constexpr int PIECES = HEAD_DIM / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = lane; i < 16 * PIECES; i += 32) {
    const int row = i / PIECES, piece = i % PIECES;
    const int offset = piece / 8 * CHUNK_ROWS * 128 + (warp * 16 + row) * 128 + (piece % 8 ^ row % 8) * 16;
    if (row < valid_rows) {
      *reinterpret_cast<uint4*>(row_gmem + row * row_stride + piece * 8) =
          *reinterpret_cast<const uint4*>(tile_smem + offset);
    }
  }
}

// The same of rows that are not evenly apart: `row_gmem(row)` is where one begins, if it `exists(row)`.
template <int HEAD_DIM, typename Place, typename Exists>
__device__ __forceinline__ void rows_to_places(const unsigned char* tile_smem, Place row_gmem, Exists exists, int warp,
                                               int lane) {
  constexpr int PIECES = HEAD_DIM / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = lane; i < 16 * PIECES; i += 32) {
    const int row = i / PIECES, piece = i % PIECES;
    const int offset = piece / 8 * 64 * 128 + (warp * 16 + row) * 128 + (piece % 8 ^ row % 8) * 16;
    if (exists(row)) {
      *reinterpret_cast<uint4*>(row_gmem(row) + piece * 8) = *reinterpret_cast<const uint4*>(tile_smem + offset);
    }
  }
}
