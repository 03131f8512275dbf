// block_place.cuh: which keys of which K/V head a block of backward_wgmma has. Blocks begin in the order of their
// numbers. Needs the constants of backward_wgmma.cu.j2.

struct BlockPlace {
  int tile;         // of keys of the head, or a slot of packed sequences
  int part, parts;  // of its queries
  int kv_head, batch;
  int64_t sums;  // QUERY_SPLIT > 1: number of the part among all

  // `number`: IN_ORDER, whether blocks wait for those of later keys, which then come first; SECTIONS: heads of a
  // section; SPLIT_LAST: tiles of keys that are not split.
  // CLAIMED: `claimed` of `blocks` in place of those of the grid.
  __device__ __forceinline__ BlockPlace(int seqlen_k, int kv_heads, int number, int claimed, int blocks)
      : parts(QUERY_SPLIT) {
    const int x = blockIdx.x / (1 + PAIRED), all_x = gridDim.x / (1 + PAIRED);  // PAIRED: two have a pair of tiles
    if constexpr (SPLIT_LAST) {
      const int block = CLAIMED ? claimed : blockIdx.x, behind = block - number, split = behind / QUERY_SPLIT;
      const int all = number + ((CLAIMED ? blocks : int(gridDim.x)) - number) / QUERY_SPLIT;
      part = behind < 0 ? 0 : behind - split * QUERY_SPLIT, parts = behind < 0 ? 1 : QUERY_SPLIT, sums = behind;
      take(behind < 0 ? block : number + split, all, (seqlen_k + BLOCK_N - 1) / BLOCK_N, kv_heads);
      return;
    }
    int tiles;  // parts of the tiles of a head
    if constexpr (CLAIMED) tiles = VARLEN ? blocks / kv_heads : (seqlen_k + BLOCK_N - 1) / BLOCK_N * QUERY_SPLIT;
    else tiles = HEADS_FASTEST || SECTIONS ? gridDim.z : all_x;
    if constexpr (SECTIONS) {  // of the first one's heads the first keys, then the next; then of the heads of the next
      const int units = CLAIMED ? blocks / tiles : all_x * gridDim.y;
      const int first = units % number;  // heads, the first section's where less
      int block = CLAIMED ? claimed : (blockIdx.z * gridDim.y + blockIdx.y) * all_x + x;
      int unit = 0, here = first;
      if (block >= first * tiles) {
        block -= first * tiles, here = number;
        const int section = block / (number * tiles);
        block -= section * number * tiles, unit = first + section * number;
      }
      tile = block / here, unit += block - tile * here;
      batch = unit / kv_heads, kv_head = unit - batch * kv_heads;
    } else if constexpr (CLAIMED) {
      take(claimed, blocks, tiles, kv_heads);
    } else {
      tile = HEADS_FASTEST ? blockIdx.z : x;
      kv_head = HEADS_FASTEST ? x : blockIdx.y, batch = HEADS_FASTEST ? blockIdx.y : blockIdx.z;
    }
    if (IN_ORDER && (BlockStates::LISTED || (CAUSAL && number > 0))) tile = tiles - 1 - tile;
    sums = (int64_t(batch) * kv_heads + kv_head) * tiles + tile;
    part = tile % QUERY_SPLIT, tile /= QUERY_SPLIT;
    if constexpr (PAIRED) tile = 2 * tile + blockIdx.x % 2;
  }
  // SPLIT_LAST: the tile of keys with a number among `all` of them.
  __device__ __forceinline__ BlockPlace(int number, int all, int seqlen_k, int kv_heads) {
    take(number, all, (seqlen_k + BLOCK_N - 1) / BLOCK_N, kv_heads);
  }

private:
  // `tiles`: of a head.
  __device__ __forceinline__ void take(int number, int all, int tiles, int kv_heads) {
    const int units = all / tiles;
    tile = HEADS_FASTEST ? number / units : number % tiles;
    const int unit = HEADS_FASTEST ? number % units : number / tiles;
    batch = unit / kv_heads, kv_head = unit - batch * kv_heads;
  }
};
