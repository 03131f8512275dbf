// key_shares.cuh: which tiles of keys of which rows each block works on. All tiles of keys of all tiles of rows, and
// ROWS_COST for each tile of rows, are counted one behind the other; of N, block b of B takes those from b · N / B to
// (b + 1) · N / B. A tile of rows may so be of several blocks, and a block has several, of which the first and the last
// may be shared. Nobody waits for another block. Needs the constants of latent_columns.cu.j2.
#include "device/mask.cuh"
#include "device/ptx/warp.cuh"
#include "device/schedule/block.cuh"
#include "device/schedule/unit_search.cuh"
#include "device/score.cuh"
#include "latent_columns/shared_layout.cuh"

constexpr int ROWS_COST = 1;  // tiles of keys for whose time a tile of rows begins and ends

// A tile of rows of a sequence: for each of QUERIES queries the same HEADS heads, which share a K/V head.
struct RowTile {
  int batch, kv_head, query, queries;  // from `query` on
  int first_head, heads;               // of a group, from first_head of all on
  RowTile() = default;
  __device__ __forceinline__ RowTile(int batch, int row, int seqlen_q, int group_heads) : batch(batch) {
    const int head_blocks = (group_heads + HEADS - 1) / HEADS, query_blocks = (seqlen_q + QUERIES - 1) / QUERIES;
    first_head = row % head_blocks * HEADS, heads = min(HEADS, group_heads - first_head);
    query = row / head_blocks % query_blocks * QUERIES, queries = min(QUERIES, seqlen_q - query);
    kv_head = row / head_blocks / query_blocks, first_head += kv_head * group_heads;
  }
  // Whether there is a row for this place of the tile.
  __device__ __forceinline__ bool has(int row) const { return row % HEADS < heads && row / HEADS < queries; }
};

struct KeyShares : Block {
  int batches, kv_heads, seqlen_q, seqlen_k, group_heads;
  Terms terms;
  int rows;           // tiles of rows of a sequence
  int all, blocks;    // what is counted; blocks that have a share of it
  int unit, end;      // what is left of this block's share
  int sequence, row;  // where that begins: the next tile of rows
  int row_begin;      // and where this begins

  RowTile tile;              // at hand
  int index;                 // of it, of all
  int keys, first_keys;      // that its last query sees, and its first
  int first_tile, end_tile;  // of keys, this block's
  bool shared;               // other blocks have others

  __device__ __forceinline__ KeyShares(unsigned char* smem, int batches, int kv_heads, int seqlen_q, int seqlen_k,
                                       int group_heads, const Terms& terms)
      : Block(smem),
        batches(batches),
        kv_heads(kv_heads),
        seqlen_q(seqlen_q),
        seqlen_k(seqlen_k),
        group_heads(group_heads),
        terms(terms),
        rows((group_heads + HEADS - 1) / HEADS * ((seqlen_q + QUERIES - 1) / QUERIES) * kv_heads) {}

  __device__ __forceinline__ int keys_of(int sequence) {
    if constexpr (SEQUSED) return terms.template keys_in_use<false>(sequence, seqlen_k);
    else return seqlen_k;
  }
  // What a tile of rows of a sequence with so many keys counts: as much as the last query's, which sees most.
  __device__ __forceinline__ int units_of(int sequence_keys) const {
    const int seen = Mask(seqlen_q, sequence_keys).keys_of(seqlen_q - 1);
    return max(1, (seen + BLOCK_N - 1) / BLOCK_N) + ROWS_COST;
  }
  // Where block b's share begins.
  __device__ __forceinline__ int share(int b) const { return int(int64_t(b) * all / blocks); }
  // Which block has it.
  __device__ __forceinline__ int block_of(int unit) const { return int(((unit + int64_t(1)) * blocks - 1) / all); }

  // By whole warps, each for itself: this block's share, and the sequence in which it begins.
  __device__ __forceinline__ void begin() {
    int sum = 0;
    if constexpr (SEQUSED) {
#pragma unroll 4
      for (int i = lane; i < batches; i += 32) sum += units_of(keys_of(i));
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    } else {
      sum = batches * units_of(seqlen_k);
    }
    all = sum * rows, blocks = min(int(gridDim.x), all);
    unit = end = sequence = row = row_begin = 0;
    if (int(blockIdx.x) >= blocks) return;
    unit = share(blockIdx.x), end = share(blockIdx.x + 1);
    if constexpr (SEQUSED) {
      sequence = item_of_unit(unit, batches, lane, row_begin, [&](int i) { return units_of(keys_of(i)) * rows; });
    } else {
      sequence = unit / (units_of(seqlen_k) * rows), row_begin = sequence * units_of(seqlen_k) * rows;
    }
    const int units = units_of(keys_of(sequence));
    row = (unit - row_begin) / units, row_begin += row * units;
  }

  // The next tile of rows of which this block has tiles of keys, false if there is none.
  __device__ __forceinline__ bool next() {
    while (unit < end) {
      if (row == rows) ++sequence, row = 0;
      const int of_all = keys_of(sequence), units = units_of(of_all);
      tile = RowTile(sequence, row, seqlen_q, group_heads), index = sequence * rows + row;
      const Mask mask(seqlen_q, of_all);
      keys = mask.keys_of(tile.query + tile.queries - 1), first_keys = mask.keys_of(tile.query);
      first_tile = max(0, unit - row_begin - ROWS_COST), end_tile = min(end - row_begin, units) - ROWS_COST;
      shared = first_tile > 0 || end_tile < units - ROWS_COST;
      ++row, row_begin += units, unit = row_begin;
      if (first_tile < end_tile) return true;
    }
    return false;
  }
  // Of the tile of rows at hand, of which this block has the first keys: how many blocks have keys.
  __device__ __forceinline__ int sharers() const { return block_of(row_begin - 1) - int(blockIdx.x) + 1; }
};
