// query_walk.cuh: the tiles of queries that see a block's keys, of each head of its group, in the order in which
// producer and consumers go through them. Needs the constants of backward_wgmma.cu.j2.
#include "device/backward/query_mask.cuh"

// The block's keys and what sees them.
struct KeyBlock {
  int key_tile, kv_head, batch;
  int first_key;
  int first_tile, tiles;  // of queries

  // `key_tile`: of the block's sequence.
  __device__ __forceinline__ KeyBlock(const Mask& mask, int key_tile) : key_tile(key_tile) {
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
  int heads_left;

  __device__ __forceinline__ QueryWalk(const KeyBlock& block, int group)
      : head(block.kv_head * group), left(block.tiles), heads_left(block.tiles > 0 ? group : 0) {
    tile = first_of(block);
  }
  __device__ __forceinline__ bool done() const { return heads_left == 0; }
  __device__ __forceinline__ bool is_last() const { return heads_left == 1 && left == 1; }
  __device__ __forceinline__ void advance(const KeyBlock& block) {
    if (--left == 0) {
      --heads_left, ++head, left = block.tiles, tile = first_of(block);
    } else if (++tile == block.first_tile + block.tiles) {
      tile = block.first_tile;
    }
  }

private:
  static __device__ __forceinline__ int first_of(const KeyBlock& block) {
    return block.first_tile + (ROTATED && block.tiles > 0 ? block.key_tile % block.tiles : 0);
  }
};
