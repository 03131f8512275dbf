// lane_pieces.cuh: the part of a warp's tile of rows that one lane works on, in pieces of VECTOR_BYTES. A lane's pieces
// come to its registers straight from global memory; by way of a ring in shared memory where the lane reads back only
// what it copied itself: no barrier, no bank conflict, no swizzle; or out of a tile in shared memory that a tensor map
// has brought.
#include "device/ptx/element.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/load_streaming.cuh"

template <int WORDS>
__device__ __forceinline__ void read_words(uint32_t (&x)[WORDS], const unsigned char* source_smem) {
  if constexpr (WORDS == 4) {
    const uint4 y = *reinterpret_cast<const uint4*>(source_smem);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else if constexpr (WORDS == 2) {
    const uint2 y = *reinterpret_cast<const uint2*>(source_smem);
    x[0] = y.x, x[1] = y.y;
  } else {
    x[0] = *reinterpret_cast<const uint32_t*>(source_smem);
  }
}

// Which row of a tile that a tensor map has brought (`TensorTile`) is taken for row `place`. Its swizzle keeps chunk c
// of 16 bytes of row r at c ^ r % 8. Eight lanes that read together want of neighbouring rows chunks 0 to 3 (K of mma),
// of every other row chunks 0 and 1 (V of mma), or chunks 0 to 8 / n - 1 of n neighbours (CUDA cores). Rows dealt out
// so bring all of these to eight different bank groups; as they lie, the first met at four. Softmax and sums do not
// mind the order of keys.
constexpr __device__ __forceinline__ int swizzled_row(int place) { return place ^ place % 2 * 4; }

// Rows of a lane, counted from its first: ROW_STEP apart; PAIRED (the operand of P V): two neighbours, two more eight
// rows on, and so on. Columns: COLUMN_STEPS pieces COLUMN_STEP elements apart, of which those past HEAD_DIM are zero.
template <typename Element, int HEAD_DIM, int VECTOR_BYTES, int ROWS, int ROW_STEP, bool PAIRED, int COLUMN_STEPS,
          int COLUMN_STEP>
struct LanePieces {
  static constexpr int WORDS = VECTOR_BYTES / 4, PIECE_BYTES = VECTOR_BYTES;
  // Of a tile in a ring: [piece, 32 lanes, VECTOR_BYTES].
  static constexpr int WARP_BYTES = ROWS * COLUMN_STEPS * 32 * VECTOR_BYTES;
  static constexpr bool WHOLE_ROWS = COLUMN_STEPS * COLUMN_STEP == HEAD_DIM;
  uint32_t at[ROWS][COLUMN_STEPS][WORDS];

  static constexpr __device__ __forceinline__ int row_offset(int i) {
    return PAIRED ? i / 4 * 16 + i % 4 / 2 * 8 + i % 2 : i * ROW_STEP;
  }

  // `row_gmem(offset)` is where the lane's first piece of the row `offset` rows behind its first one is; there are
  // `rows` rows from its first on, and `columns` columns from its first on.
  template <typename RowPointer> __device__ __forceinline__ void load(RowPointer row_gmem, int rows, int columns) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; ++c) {
        load_streaming<VECTOR_BYTES>(at[i][c], row_gmem(row_offset(i)) + c * COLUMN_STEP,
                                     row_offset(i) < rows && (WHOLE_ROWS || c * COLUMN_STEP < columns));
      }
  }
  // The same into this lane's places of a tile in a ring.
  template <typename RowPointer>
  static __device__ __forceinline__ void copy(uint32_t lane_smem, RowPointer row_gmem, int rows, int columns) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; ++c) {
        const bool valid = row_offset(i) < rows && (WHOLE_ROWS || c * COLUMN_STEP < columns);
        cp_async<VECTOR_BYTES>(lane_smem + (i * COLUMN_STEPS + c) * 32 * VECTOR_BYTES,
                               row_gmem(row_offset(i)) + c * COLUMN_STEP, valid ? VECTOR_BYTES : 0);
      }
  }
  __device__ __forceinline__ void read(const unsigned char* lane_smem) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; ++c)
        read_words(at[i][c], lane_smem + (i * COLUMN_STEPS + c) * 32 * VECTOR_BYTES);
  }
  // Out of a tile of TILE_ROWS rows that a tensor map has brought: chunks of 128 bytes of all rows; `swizzled_row`. The
  // lane's first piece is at `row`, `column`.
  template <int TILE_ROWS>
  __device__ __forceinline__ void read_tile(const unsigned char* tile_smem, int row, int column) {
    static_assert(VECTOR_BYTES == 16 || VECTOR_BYTES == 8, "a piece is a chunk of the swizzle, or half of one");
    constexpr int ROW_BYTES = (HEAD_DIM * int(sizeof(Element)) + 127) / 128 * 128;
    const uint32_t lane_byte = column * sizeof(Element);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; ++c) {
        const uint32_t from = swizzled_row(row + row_offset(i) % 8) + row_offset(i) / 8 * 8;
        const uint32_t byte = lane_byte + c * COLUMN_STEP * sizeof(Element);
        if (COLUMN_STEPS * COLUMN_STEP * int(sizeof(Element)) > ROW_BYTES && byte >= ROW_BYTES) {
#pragma unroll
          for (int word = 0; word < WORDS; ++word) at[i][c][word] = 0;
        } else {
          read_words(at[i][c], tile_smem + byte / 128 * (TILE_ROWS * 128) + from * 128 + (byte % 128 ^ from % 8 * 16));
        }
      }
  }
  // After `read_tile`: zeros for rows of the tile from `rows` on, where there may be NaN.
  __device__ __forceinline__ void clear_tile_from(int rows, int row) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (swizzled_row(row + row_offset(i) % 8) + row_offset(i) / 8 * 8 < rows) continue;
#pragma unroll
      for (int c = 0; c < COLUMN_STEPS; ++c)
#pragma unroll
        for (int word = 0; word < WORDS; ++word) at[i][c][word] = 0;
    }
  }
};
