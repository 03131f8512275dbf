// swizzle.cuh: where a row-major tile of 16-byte chunks lies in shared memory, so that eight rows of one chunk column
// meet eight different bank groups (ldmatrix reads them in one wavefront).
#include "device/ptx/element.cuh"

// CHUNKS per row, even. SWIZZLED: chunk c of row r lies at c ^ (r / (8 / 2^LOG) % 2^LOG), 2^LOG being the power of two
// in CHUNKS, at most 8: r * CHUNKS is a multiple of 2^LOG and repeats every 8 / 2^LOG rows mod 8, the exclusive-or
// tells the repeats apart. Otherwise one unused chunk ends each row: an odd row length needs no swizzle. Both repeat
// every eight rows.
template <int CHUNKS, bool SWIZZLED> struct TileLayout {
  static_assert(CHUNKS % 2 == 0, "mma k-steps are two chunks");
  static constexpr int LOG = CHUNKS % 8 == 0 ? 3 : CHUNKS % 4 == 0 ? 2 : 1;
  static constexpr int ROW_BYTES = 16 * (SWIZZLED ? CHUNKS : CHUNKS + 1);

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    if constexpr (SWIZZLED) chunk ^= (row >> (3 - LOG)) & ((1 << LOG) - 1);
    return uint32_t(row * ROW_BYTES + chunk * 16);
  }

  // ldmatrix takes 16x16 elements at a time, from one address per lane. That of the tile's first block is one of:
  // - blocks in the order of mma's A operand, or transposed of two B operands: rows 0-7, rows 8-15 of the first chunk,
  // then of the second;
  static __device__ __forceinline__ uint32_t rows_first(int lane) { return offset(lane % 16, lane / 16); }
  // - blocks in the order of two B operands as they stand (mma wants a B operand in neighbouring registers): both
  // chunks of rows 0-7, then of rows 8-15.
  static __device__ __forceinline__ uint32_t chunks_first(int lane) {
    return offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  // Other blocks lie a constant away, but for the bits that the swizzle mixes: there chunk c ^ x becomes (c + 2i) ^ x =
  // (c ^ x) ^ 2i. That takes tiles aligned to 128 bytes or to whole rows from there.
  static __device__ __forceinline__ uint32_t block_address(uint32_t first_block, int row_block, int column_block) {
    constexpr int PERIOD = SWIZZLED ? (1 << LOG) / 2 : 1;
    return (first_block ^ (column_block % PERIOD * 32)) + row_block * 16 * ROW_BYTES +
           column_block / PERIOD * PERIOD * 32;
  }
};
