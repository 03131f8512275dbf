// sequence_share.cuh: which key tiles of which tiles of rows each block works on, where one wave of blocks shares all
// work of packed sequences equally, whatever their lengths are. Units are counted one behind the other: sequence by
// sequence, head by head, for each tile of rows about as many as it sees key tiles, and ROWS_COST. Each block takes as
// many of them as any other, from the last to the first. So a sequence of one query and many keys is of several blocks,
// and a block has several tiles of rows, of which the first and the last may be shared. Nobody waits for another block:
// each leaves its result, and the last one adds up all. Needs the constants of flash_wgmma.cu.j2.
#include "device/schedule/sequences.cuh"
#include "device/schedule/unit_search.cuh"
#include "flash_wgmma/key_share.cuh"

constexpr int ROWS_COST = BLOCK_N < 96 ? 2 : 1;  // key tiles for whose time a tile of rows begins and ends
constexpr int LEAST_SHARE = 2 + ROWS_COST;       // of a block

struct SequenceShare {
  int each;                       // a block's share; of the last one there may be less
  int end;                        // of what is left of this block's
  int sequence, head, row_block;  // the tile of rows in which it ends
  int head_begin, rows_end;       // where that head begins, and where in it the tile ends
  int entered;                    // the sequence that `work` has entered

  template <class Work> static __device__ __forceinline__ int row_blocks_of(const Work& work) {
    return (work.rows.count + BLOCK_M - 1) / BLOCK_M;
  }
  // `count` times as many keys, in key tiles.
  static __device__ __forceinline__ int tiles_of(int count, int keys) {
    return count / BLOCK_N * keys + count % BLOCK_N * keys / BLOCK_N;
  }
  // Units of the first `count` tiles of rows of a head of the sequence that `work` has entered. By a diagonal each tile
  // sees as many more keys than the one before as it has queries, until it sees `most`.
  template <class Work> static __device__ __forceinline__ int units_before(const Work& work, int count) {
    int most = work.seqlen_k, rising = 0, units = count * (ROWS_COST + 1);
    if constexpr (Mask::ROWS_DIFFER) {
      const int queries = max(1, BLOCK_M >> work.rows.row_bits()), first = max(0, work.mask.offset);
      if constexpr (Mask::WINDOW) most = min(most, work.mask.offset - work.mask.lowest + 1 + queries);
      rising = min(count, max(0, most - first) / queries);
      units += tiles_of(first, rising) + tiles_of(rising * (rising + 1) / 2, queries);
    }
    return units + tiles_of(most, count - rising);
  }
  template <class Work> __device__ __forceinline__ int units_of_head(Work& work, int index) {
    work.enter_sequence(work.packed.at(entered = index));
    return units_before(work, row_blocks_of(work));
  }

  // By whole warps, each for itself: this block's share, and the tile of rows in which it ends.
  template <class Work> __device__ __forceinline__ void find(Work& work, int lane) {
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < work.packed.count; i += 32) sum += units_of_head(work, i);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    const int all = sum * work.rows.heads;
    each = max(LEAST_SHARE, (all + int(gridDim.x) - 1) / int(gridDim.x));
    end = min(all, (int(blockIdx.x) + 1) * each), head_begin = 0;
    if (end <= int(blockIdx.x) * each) return;
    sequence = item_of_unit(end - 1, work.packed.count, lane, head_begin,
                            [&](int i) { return units_of_head(work, i) * work.rows.heads; });
    const int of_head = units_of_head(work, sequence);
    head = (end - 1 - head_begin) / of_head, head_begin += head * of_head;
    row_block = 0;
    for (int behind = row_blocks_of(work); behind - row_block > 1;) {
      const int middle = (row_block + behind) / 2;
      (units_before(work, middle) <= end - 1 - head_begin ? row_block : behind) = middle;
    }
    rows_end = units_before(work, row_block + 1);
  }

  // By one thread: the next tile of rows of which this block has keys, which `work` enters, with their range; false if
  // there is none.
  template <class Work> __device__ __forceinline__ bool next(Work& work) {
    const int begin = blockIdx.x * each;
    while (begin < end) {
      while (row_block < 0) {  // of the head before
        if (--head < 0) --sequence, head = work.rows.heads - 1;
        if (sequence != entered) units_of_head(work, sequence);
        row_block = row_blocks_of(work) - 1;
        rows_end = units_before(work, row_block + 1);
        head_begin -= rows_end;
      }
      if (sequence != entered) units_of_head(work, sequence);
      const int rows_begin = units_before(work, row_block), units = rows_end - rows_begin;
      const int first_tile = work.first_key_tile(row_block), tiles = work.last_seen_tile(row_block) - first_tile + 1;
      // Units in front, for which no key tile stands: each of the others has one at least.
      const int front = max(ROWS_COST, units - tiles), place = head_begin + rows_begin;
      int first = 0, behind = tiles;
      work.range.sharers = 0;
      if (place + front < begin || place + units > end) {  // some are other blocks'
        auto tile_of = [&](int unit) { return max(0, unit - front) * tiles / (units - front); };
        first = tile_of(begin - place), behind = tile_of(min(end - place, units));
        const int first_block = (place + front) / each, last_block = (place + units - 1) / each;
        if (last_block > first_block) work.range.sharers = (last_block - first_block + 1) << 16 | first_block;
      }
      work.tile = Tile{row_block, head, sequence};
      work.range.word = (first_tile + behind - 1) << 16 | (first_tile + first);
      end = place, rows_end = rows_begin, --row_block;
      if (first < behind) return true;
    }
    return false;
  }
};
