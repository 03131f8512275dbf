// block_tile.cuh: how blocks come to their tiles of rows.
#include "device/schedule/tile_order.cuh"

enum class Schedule {
  SINGLE,    // a block for each tile of rows
  FIXED,     // as many blocks as run at once, block b of B takes tiles b, b + B, b + 2B …
  CLAIMED,   // as many blocks as run at once, each claims the next tile from a counter
  BALANCED,  // as many blocks as run at once, each takes the same number of key tiles
};

// The order of `tile_at`, with no division unless a number of heads other than one and all take turns: grid (row
// blocks, heads, batch) for HEADS = 1, (heads, batch, row blocks) for 0, else (HEADS, row blocks, turns). SPLIT
// neighbours along x have the same tile. A tile with `batch` or more is none.
template <int HEADS, bool LAST_FIRST, int SPLIT> __device__ __forceinline__ Tile block_tile(int row_blocks, int heads) {
  const int x = blockIdx.x / SPLIT, y = blockIdx.y, z = blockIdx.z;
  const int row_block = HEADS == 0 ? z : HEADS == 1 ? x : y;
  const int head = HEADS == 0 ? x : HEADS == 1 ? y : (z * HEADS + x) % heads;
  const int batch = HEADS == 0 ? y : HEADS == 1 ? z : (z * HEADS + x) / heads;
  return Tile{LAST_FIRST ? row_blocks - 1 - row_block : row_block, head, batch};
}

// FIXED: the tile number of this block's round. ALTERNATING: the order of blocks does, so that none always gets the
// longer tiles.
template <bool ALTERNATING> __device__ __forceinline__ int fixed_tile(int round) {
  return round * gridDim.x + (ALTERNATING && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}
