// query_walk.cuh: the tiles of queries that see a block's keys, of each head of its group, in the order in which
// producer and consumers go through them. QUERY_SPLIT > 1: so many blocks have the same keys, each a part of these
// tiles. Needs the constants of backward_wgmma.cu.j2.
#include "device/backward/query_mask.cuh"

// The block's keys and what sees them.
struct KeyBlock {
  int key_tile, kv_head, batch, part;
  int first_key;
  int first_tile, tiles;  // of queries

  // `key_tile`: of the block's sequence.
  __device__ __forceinline__ KeyBlock(const Mask& mask, int key_tile, int part) : key_tile(key_tile), part(part) {
    kv_head = HEADS_FASTEST ? blockIdx.x : blockIdx.y;
    batch = HEADS_FASTEST ? blockIdx.y : blockIdx.z;
    first_key = key_tile * BLOCK_N;
    first_tile = mask.first_query(first_key) / BLOCK_M;
    const int queries = mask.end_query(min(first_key + BLOCK_N, mask.seqlen_k) - 1);
    tiles = max(0, (queries + BLOCK_M - 1) / BLOCK_M - first_tile);
  }
};

// Goes through them. ROTATED: blocks of other keys begin with other tiles, so that not all add to one tile of dQ.
struct QueryWalk {
  int head, left, tile;  // tiles of this head that are left
  int to_do;             // heads that are left, or, QUERY_SPLIT > 1, tiles of all of them

  __device__ __forceinline__ QueryWalk(const KeyBlock& block, int group)
      : head(block.kv_head * group), left(block.tiles), to_do(block.tiles > 0 ? group : 0) {
    tile = first_of(block);
    if constexpr (QUERY_SPLIT > 1) {
      const int64_t all = int64_t(to_do) * block.tiles;
      const int first = int(all * block.part / QUERY_SPLIT);
      to_do = int(all * (block.part + 1) / QUERY_SPLIT) - first;
      if (to_do > 0) {
        const int passed = first % block.tiles, end = block.first_tile + block.tiles;
        head += first / block.tiles, left -= passed, tile += passed;
        if (tile >= end) tile -= block.tiles;
      }
    }
  }
  __device__ __forceinline__ bool done() const { return to_do == 0; }
  __device__ __forceinline__ bool is_last() const { return to_do == 1 && (QUERY_SPLIT > 1 || left == 1); }
  __device__ __forceinline__ void advance(const KeyBlock& block) {
    if constexpr (QUERY_SPLIT > 1) --to_do;
    if (--left == 0) {
      if constexpr (QUERY_SPLIT == 1) --to_do;
      ++head, left = block.tiles, tile = first_of(block);
    } else if (++tile == block.first_tile + block.tiles) {
      tile = block.first_tile;
    }
  }

private:
  static __device__ __forceinline__ int first_of(const KeyBlock& block) {
    return block.first_tile + (ROTATED && block.tiles > 0 ? block.key_tile % block.tiles : 0);
  }
};
