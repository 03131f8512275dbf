// sequence_share.cuh: which key tiles of which tiles of rows each block works on, where one wave of blocks shares all
// work of packed sequences equally, whatever their lengths are. All key tiles that tiles of rows see, and ROWS_COST for
// each tile of rows, are counted one behind the other: sequence by sequence, head by head. Each block takes as many of
// them as any other, from the last to the first. So a sequence of one query and many keys is of several blocks, and a
// block has several tiles of rows, of which the first and the last may be shared. Nobody waits for another block: each
// leaves its result, and the last one adds up all. Needs the constants of flash_wgmma.cu.j2.
#include "device/schedule/sequences.cuh"
#include "device/schedule/unit_search.cuh"
#include "flash_wgmma/key_share.cuh"

constexpr int ROWS_COST = 1;    // key tiles for whose time a tile of rows begins and ends
constexpr int LEAST_SHARE = 3;  // of a block

struct SequenceShare {
  int each;                                   // a block's share; of the last one there may be less
  int end;                                    // of what is left of this block's
  int sequence, head, row_block, rows_begin;  // the tile of rows in which it ends, and where that begins

  // What a tile of rows counts of the sequence that `work` has entered.
  template <class Work> static __device__ __forceinline__ int units_of(const Work& work, int row_block) {
    return work.last_seen_tile(row_block) - work.first_key_tile(row_block) + 1 + ROWS_COST;
  }
  template <class Work> static __device__ __forceinline__ int row_blocks_of(const Work& work) {
    return (work.rows.count + BLOCK_M - 1) / BLOCK_M;
  }
  // What a head counts of a sequence, which `work` enters.
  template <class Work> static __device__ __forceinline__ int units_of_head(Work& work, int index) {
    work.enter_sequence(work.packed.at(index));
    const int row_blocks = row_blocks_of(work);
    if (!Mask::ROWS_DIFFER || row_blocks < 2) return row_blocks * units_of(work, 0);
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < row_blocks; ++i) sum += units_of(work, i);
    return sum;
  }
  // By whole warps, each for itself: this block's share, and the tile of rows in which it ends.
  template <class Work> __device__ __forceinline__ void find(Work& work, int lane) {
    int sum = 0;
#pragma unroll 1
    for (int i = lane; i < work.packed.count; i += 32) sum += units_of_head(work, i);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    const int all = sum * work.rows.heads;
    each = max(LEAST_SHARE, (all + int(gridDim.x) - 1) / int(gridDim.x));
    end = min(all, (int(blockIdx.x) + 1) * each), rows_begin = 0;
    if (end <= int(blockIdx.x) * each) return;
    sequence = item_of_unit(end - 1, work.packed.count, lane, rows_begin,
                            [&](int i) { return units_of_head(work, i) * work.rows.heads; });
    const int of_head = units_of_head(work, sequence);
    head = (end - 1 - rows_begin) / of_head, rows_begin += head * of_head;
    row_block =
        item_of_unit(end - 1, row_blocks_of(work), lane, rows_begin, [&](int i) { return units_of(work, i); });
  }

  // By one thread: the next tile of rows of which this block has keys, which `work` enters, with their range; false if
  // there is none.
  template <class Work> __device__ __forceinline__ bool next(Work& work) {
    const int begin = blockIdx.x * each;
    while (begin < end) {
      work.enter_sequence(work.packed.at(sequence));
      while (row_block < 0) {  // of the head before
        if (--head < 0) {
          --sequence, head = work.rows.heads - 1;
          work.enter_sequence(work.packed.at(sequence));
        }
        row_block = row_blocks_of(work) - 1;
        if (row_block >= 0) rows_begin -= units_of(work, row_block);
      }
      const int units = units_of(work, row_block), first_key_tile = work.first_key_tile(row_block);
      const int first = max(0, begin - rows_begin - ROWS_COST), last = min(end - rows_begin, units) - ROWS_COST - 1;
      const int first_block = (rows_begin + ROWS_COST) / each, sharers = (rows_begin + units - 1) / each - first_block + 1;
      work.tile = Tile{row_block, head, sequence};
      work.range = KeyRange{(first_key_tile + last) << 16 | (first_key_tile + first),
                            sharers > 1 ? sharers << 16 | first_block : 0};
      end = rows_begin, --row_block;
      if (row_block >= 0) rows_begin -= units_of(work, row_block);
      if (first <= last) return true;
    }
    return false;
  }
};
