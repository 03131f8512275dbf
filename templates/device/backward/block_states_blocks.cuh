// block_states_blocks.cuh: which tiles of queries a tile of keys takes by a block list. The lists name blocks of keys
// (device/key_list/blocks.cuh); the first launch turns them into a table of what each block is, which blocks of keys
// read column by column.
#include "device/key_list/blocks.cuh"
#include "device/ptx/warp.cuh"

struct BlockStates {
  static constexpr bool LISTED = true;
  static constexpr uint8_t EMPTY = 0, PARTIAL = 1, FULL = 2;
  KeyList list;
  uint8_t* states;  // [lists, blocks of keys, row_blocks]
  int row_blocks;

  // Of the blocks of queries with the keys of a block.
  __device__ __forceinline__ uint8_t* column(int batch, int head, int key_block) const {
    const int64_t lists = batch * list.batch_stride + head * list.head_stride;  // times row_blocks
    return states + lists * list.key_blocks + int64_t(key_block) * row_blocks;
  }
  // The states of the block of queries that begins with a tile of BLOCK_M queries, by all threads of a block, one for
  // all heads or batches that share lists.
  template <int BLOCK_M> __device__ __forceinline__ void write(int batch, int head, int tile) const {
    const int query = tile * BLOCK_M, row_block = query / list.block_rows;
    if (query != row_block * list.block_rows) return;
    if ((batch > 0 && list.batch_stride == 0) || (head > 0 && list.head_stride == 0)) return;
    const int64_t row = batch * list.batch_stride + head * list.head_stride + row_block;
    uint8_t* first = column(batch, head, 0) + row_block;
    for (int key = threadIdx.x; key < list.key_blocks; key += blockDim.x) first[int64_t(key) * row_blocks] = EMPTY;
    __syncthreads();
    for (int i = threadIdx.x; i < list.partial_counts[row]; i += blockDim.x) {
      first[int64_t(list.partial_blocks[row * list.key_blocks + i]) * row_blocks] = PARTIAL;
    }
    for (int i = threadIdx.x; i < list.full_counts[row]; i += blockDim.x) {
      first[int64_t(list.full_blocks[row * list.key_blocks + i]) * row_blocks] = FULL;
    }
  }
  // Of the 32 blocks of queries from `from` on: a bit for each that is not EMPTY, and for each PARTIAL one.
  struct Kinds {
    uint32_t seen, partial;
  };
  __device__ __forceinline__ Kinds kinds(const uint8_t* column, int from, int lane) const {
    const uint8_t state = from + lane < row_blocks ? column[from + lane] : EMPTY;
    return {__ballot_sync(ALL_LANES, state != EMPTY), __ballot_sync(ALL_LANES, state == PARTIAL)};
  }
  // The first of these kinds alone.
  __device__ __forceinline__ uint32_t seen(const uint8_t* column, int from, int lane) const {
    return __ballot_sync(ALL_LANES, from + lane < row_blocks && column[from + lane] != EMPTY);
  }
  // Tiles of queries of so many heads, of `tiles` each, that see keys of the block. By whole warps.
  template <int BLOCK_M>
  __device__ __forceinline__ int count(int batch, int first_head, int heads, int key_block, int tiles, int lane) const {
    const int of_block = list.block_rows / BLOCK_M;
    int found = 0;
    for (int head = first_head; head < first_head + heads; ++head) {
      const uint8_t* states_of_head = column(batch, head, key_block);
      for (int from = 0; from < row_blocks; from += 32) found += __popc(seen(states_of_head, from, lane)) * of_block;
      if (states_of_head[row_blocks - 1] != EMPTY) found -= row_blocks * of_block - tiles;
    }
    return found;
  }
  // Of the tiles of BLOCK_N keys behind this one, how many see a query, which sees this one's too. By whole warps.
  template <int BLOCK_N>
  __device__ __forceinline__ int behind(int batch, int head, int query, int key_tile, int tiles, int lane) const {
    const int of_block = list.block_keys / BLOCK_N, key_block = key_tile / of_block, last = list.key_blocks - 1;
    const uint8_t* of_query = column(batch, head, 0) + query / list.block_rows;
    int found = (key_block + 1) * of_block - 1 - key_tile;
    for (int from = key_block + 1; from <= last; from += 32) {
      const int at = from + lane;
      found += __popc(__ballot_sync(ALL_LANES, at <= last && of_query[int64_t(at) * row_blocks] != EMPTY)) * of_block;
    }
    if (of_query[int64_t(last) * row_blocks] != EMPTY) found -= (last + 1) * of_block - tiles;  // it may be shorter
    return found;
  }
  // On to the first tile, from this one of this head on, that sees keys of the block. There is one. By whole warps.
  template <int BLOCK_M>
  __device__ __forceinline__ void find(int batch, int& head, int& tile, int key_block, int lane) const {
    const int of_block = list.block_rows / BLOCK_M;
    for (;; ++head, tile = 0) {
      const uint8_t* states_of_head = column(batch, head, key_block);
      const int first = tile / of_block;
      for (int from = first / 32 * 32; from < row_blocks; from += 32) {
        uint32_t bits = seen(states_of_head, from, lane);
        if (from < first) bits &= ALL_LANES << (first - from);
        if (bits == 0) continue;
        const int block = from + __popc((bits & -bits) - 1);  // the lowest bit
        if (block > first) tile = block * of_block;
        return;
      }
    }
  }
  __device__ __forceinline__ int block_of(int key) const { return key / list.block_keys; }
  template <int BLOCK_M> __device__ __forceinline__ int tiles_of_block() const { return list.block_rows / BLOCK_M; }
  // Whether `pack_mask` has asked the predicate of PARTIAL blocks.
  __device__ __forceinline__ bool packed() const { return list.bits != nullptr; }
  // What it found for keys `key` and `key` + 8 of a lane and queries from `query` on.
  template <int QUERIES>
  __device__ __forceinline__ void load_seen(SeenKeys<2, QUERIES>& seen, int batch, int head, int key, int query,
                                            int lane) const {
    const uint32_t* bits = list.bits + batch * list.bits_batch_stride + head * list.bits_head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      seen.load(i, bits + int64_t(key + i * 8) * list.bits_row_words + query / 32, query % 32, lane % 4 * 2);
  }
  __device__ __forceinline__ bool is_partial(int batch, int head, int key_block, int query) const {
    return column(batch, head, key_block)[query / list.block_rows] == PARTIAL;
  }
  template <class Terms>
  static __device__ __forceinline__ bool shows(const Terms& terms, int batch, int head, int query, int key) {
    return terms.shows(batch, head, query, key);
  }
};
