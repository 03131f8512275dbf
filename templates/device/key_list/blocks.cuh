// blocks.cuh: a block of rows takes the tiles of the blocks of keys that two lists name, as FlexAttention's `BlockMask`
// has them. In PARTIAL blocks a key is seen if the mask and a predicate show it, in FULL ones in any case. Tiles of
// rows and of keys are parts of a block.
#include "device/ptx/element.cuh"
#define KEY_LIST_PARAMETERS                                                                                     \
  , const int *__restrict__ kv_num_blocks, const int *__restrict__ kv_indices,                                  \
      const int *__restrict__ full_kv_num_blocks, const int *__restrict__ full_kv_indices, int list_block_rows, \
      int list_block_keys, int list_key_blocks, int64_t list_batch_stride, int64_t list_head_stride
#define KEY_LIST_ARGUMENTS                                                                                           \
  kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, list_block_rows, list_block_keys, list_key_blocks, \
      list_batch_stride, list_head_stride

// What lies in memory. Lists are rows of `key_blocks` numbers of blocks, of which the first count.
struct KeyList {
  static constexpr bool LISTED = true;
  const int *partial_counts, *partial_blocks, *full_counts, *full_blocks;  // [lists, blocks of rows(, key_blocks)]
  int block_rows, block_keys, key_blocks;
  int64_t batch_stride, head_stride;  // lists; 0 where it is the same for all
};

// The tiles of BLOCK_N keys that a tile of rows takes: those of PARTIAL blocks, then those of FULL ones.
template <int BLOCK_N> struct ListedTiles {
  const int *partial_blocks, *full_blocks;
  int block_keys, tiles_per_block, partial_tiles, tiles;

  __device__ __forceinline__ ListedTiles(const KeyList& list, int batch, int head, int block_row)
      : block_keys(list.block_keys), tiles_per_block(list.block_keys / BLOCK_N) {
    const int64_t row = batch * list.batch_stride + head * list.head_stride + block_row / list.block_rows;
    partial_blocks = list.partial_blocks + row * list.key_blocks;
    full_blocks = list.full_blocks + row * list.key_blocks;
    partial_tiles = list.partial_counts[row] * tiles_per_block;
    tiles = partial_tiles + list.full_counts[row] * tiles_per_block;
  }
  __device__ __forceinline__ bool is_partial(int tile) const { return tile < partial_tiles; }
  __device__ __forceinline__ int first_key(int tile) const {
    const int *blocks = is_partial(tile) ? partial_blocks : full_blocks,
              of_kind = tile - (is_partial(tile) ? 0 : partial_tiles);
    const int number = of_kind / tiles_per_block;
    return blocks[number] * block_keys + (of_kind - number * tiles_per_block) * BLOCK_N;
  }

  // The same, counted down: from `tiles` - 1 FULL blocks first, in each the first keys first, then PARTIAL ones. Where
  // the lists name none, key 0.
  __device__ __forceinline__ int first_key_down(int tile) const {
    if (tiles == 0) return 0;
    return first_key(is_partial(tile) ? partial_tiles - 1 - tile : tiles - 1 - (tile - partial_tiles));
  }

  // s = -inf for keys that the predicate hides. `row` and `key` are this lane's first; of those past the last it may
  // say anything.
  template <class Terms, int FLOATS>  // wgmma's accumulators
  static __device__ __forceinline__ void mask_partial(float (&s)[FLOATS], const Terms& terms, int batch, int head,
                                                      int row, int key) {
    if constexpr (!decltype(terms.own)::SHOWS) return;
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!terms.shows(batch, head, row + j / 2 * 8, key + i * 2 + j % 2)) s[i + j] = NEGATIVE_INFINITY;
      }
  }
  template <class Terms, int ROW_TILES, int KEY_TILES>  // those of mma
  static __device__ __forceinline__ void mask_partial(float (&s)[ROW_TILES][KEY_TILES][4], const Terms& terms,
                                                      int batch, int head, int row, int key) {
    if constexpr (!decltype(terms.own)::SHOWS) return;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!terms.shows(batch, head, row + m * 16 + j / 2 * 8, key + n * 8 + j % 2)) s[m][n][j] = NEGATIVE_INFINITY;
        }
  }
};
