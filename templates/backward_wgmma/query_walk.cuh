// query_walk.cuh: the tiles of queries that see a block's keys, of each head of its group, in the order in which
// producer and consumers go through them. QUERY_SPLIT > 1: so many blocks have the same keys, each a part of these
// tiles. Where a block list names them, the producer finds them and tells the consumers. Needs the constants of
// backward_wgmma.cu.j2.
#include "device/backward/query_mask.cuh"
#include "backward_wgmma/block_place.cuh"

// The block's keys and what sees them.
struct KeyBlock {
  BlockStates states;
  int key_tile, kv_head, batch, part, parts;
  int first_key;
  int first_tile, tiles;  // of queries; those of a head where a block list names which

  // `key_tile`: of the block's sequence.
  __device__ __forceinline__ KeyBlock(const Mask& mask, const BlockPlace& place, int key_tile,
                                      const BlockStates& states)
      : states(states),
        key_tile(key_tile),
        kv_head(place.kv_head),
        batch(place.batch),
        part(place.part),
        parts(place.parts) {
    first_key = key_tile * BLOCK_N;
    const int first = PAIRED ? first_key - key_tile % 2 * BLOCK_N : first_key;  // of all that go through these tiles
    first_tile = BlockStates::LISTED ? 0 : mask.first_query(first) / BLOCK_M;
    const int queries =
        BlockStates::LISTED ? mask.seqlen_q : mask.end_query(min(first + BLOCK_N * (1 + PAIRED), mask.seqlen_k) - 1);
    tiles = max(0, (queries + BLOCK_M - 1) / BLOCK_M - first_tile);
  }
  // Of dQ, a part for each warpgroup: the first of this block. PAIRED: two blocks share it.
  __device__ __forceinline__ int first_part() const { return PAIRED ? key_tile % 2 * WARPGROUPS : 0; }
};

// A tile that a block list names, as the producer tells it.
struct ToldTile {
  using Word = int2;
  int head = 0, tile = 0;
  bool partial = false;  // of a PARTIAL block

  __device__ __forceinline__ Word word() const { return make_int2(head, 2 * tile + partial); }
  __device__ __forceinline__ void take(Word word) { head = word.x, tile = word.y / 2, partial = word.y % 2 != 0; }
};

// Goes through them. ROTATED: blocks of other keys begin with other tiles, so that not all add to one tile of dQ.
struct BandWalk {
  static constexpr bool partial = false;
  int head, left, tile;  // tiles of this head that are left
  int to_do;             // heads that are left, or, QUERY_SPLIT > 1, tiles of all of them

  __device__ __forceinline__ BandWalk(const KeyBlock& block, int group)
      : head(block.kv_head * group), left(block.tiles), to_do(block.tiles > 0 ? group : 0) {
    tile = first_of(block);
    if constexpr (QUERY_SPLIT > 1) {
      const int parts = SPLIT_LAST ? block.parts : QUERY_SPLIT;
      const int64_t all = int64_t(to_do) * block.tiles;
      const int first = int(all * block.part / parts);
      to_do = int(all * (block.part + 1) / parts) - first;
      if (to_do > 0) {
        const int passed = first % block.tiles, end = block.first_tile + block.tiles;
        head += first / block.tiles, left -= passed, tile += passed;
        if (tile >= end) tile -= block.tiles;
      }
    }
  }
  __device__ __forceinline__ void begin(const KeyBlock&, int) {}
  __device__ __forceinline__ void take(ToldTile::Word) {}
  __device__ __forceinline__ ToldTile::Word word() const { return {0, 0}; }
  __device__ __forceinline__ bool done() const { return to_do == 0; }
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

// Goes through those that a block list names, by whole warps, once the table of blocks is there.
struct ListedWalk : ToldTile {
  int left;               // tiles of all heads
  int from, end;          // the 32 blocks of queries at hand begin with; where the tiles of this block end
  BlockStates::Kinds of;  // these blocks; of those that are seen, the lowest is at hand

  __device__ __forceinline__ ListedWalk(const KeyBlock& block, int group) {
    head = block.kv_head * group, from = 0;
    left = block.states.count<BLOCK_M>(block.batch, head, group, number(block), block.tiles, lane());
    if (left > 0) load(block), find(block);
  }
  __device__ __forceinline__ bool done() const { return left == 0; }
  __device__ __forceinline__ void advance(const KeyBlock& block) {
    if (--left == 0 || ++tile < end) return;
    of.seen &= of.seen - 1;
    find(block);
  }

private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int number(const KeyBlock& block) { return block.states.block_of(block.first_key); }
  __device__ __forceinline__ void load(const KeyBlock& block) {
    of = block.states.kinds(block.states.column(block.batch, head, number(block)), from, lane());
  }
  __device__ __forceinline__ void find(const KeyBlock& block) {
    while (of.seen == 0) {
      from += 32;
      if (from >= block.states.row_blocks) from = 0, ++head;
      load(block);
    }
    const uint32_t lowest = of.seen & -of.seen;
    const int tiles = block.states.tiles_of_block<BLOCK_M>();
    tile = (from + __popc(lowest - 1)) * tiles, end = min(tile + tiles, block.tiles);
    partial = (of.partial & lowest) != 0;
  }
};

// What a consumer knows of it.
struct ToldWalk : ToldTile {
  int left = 0;  // tiles of all heads

  __device__ __forceinline__ ToldWalk(const KeyBlock&, int) {}
  // Once the table of blocks is there.
  __device__ __forceinline__ void begin(const KeyBlock& block, int group) {
    left = block.states.count<BLOCK_M>(block.batch, block.kv_head * group, group,
                                       block.states.block_of(block.first_key), block.tiles, threadIdx.x % 32);
  }
  __device__ __forceinline__ bool done() const { return left == 0; }
  __device__ __forceinline__ void advance(const KeyBlock&) { --left; }
};

template <bool LISTED> struct Walks {
  using Producers = BandWalk;
  using Consumers = BandWalk;
};
template <> struct Walks<true> {
  using Producers = ListedWalk;
  using Consumers = ToldWalk;
};
using QueryWalk = Walks<BlockStates::LISTED>::Producers;
using ConsumerWalk = Walks<BlockStates::LISTED>::Consumers;
