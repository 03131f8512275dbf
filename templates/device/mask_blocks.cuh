// mask_blocks.cuh: the lists of a `BlockMask` of FlexAttention out of a predicate, in two launches: what each block of
// rows and keys is, then the numbers of the PARTIAL and of the FULL ones, by rows and by keys. A source that includes
// it has a class `Seen` with `shows(batch, head, query, key)`, `range` of it for ranges of these, the same of all lanes
// of a warp or not, `PAIRED` (neighbouring keys read neighbouring elements of a table), the macros SEEN_PARAMETERS and
// SEEN_ARGUMENTS, and FIND_BLOCK_STATES_KERNEL behind all.
#include "device/ptx/warp.cuh"
#include "device/score.cuh"
#include "device/score_range.cuh"

constexpr int WARPS_OF_STATES = 4, WARPS_OF_LINES = 4;
enum BlockState : uint8_t { EMPTY = 0, PARTIAL = 1, FULL = 2 };

// A warp for each block of the mask. Pairs past the last row or key are hidden, so that a block with such pairs is
// never FULL. Where the ranges of its rows and keys do not say what it is, each lane asks for a key of its own and all
// rows; where these do not say it, the warp asks the ranges of 32 by 32, and at last pair by pair, until it has met
// both kinds. `states`: [batches * heads, row blocks, key blocks].
template <class Seen>
__device__ __forceinline__ void find_states(const Seen& seen, uint8_t* states, int heads, int seqlen_q, int seqlen_k,
                                            int block_rows, int block_keys) {
  const int batch = blockIdx.z / heads, head = blockIdx.z - batch * heads, lane = threadIdx.x % 32;
  const int key_blocks = (seqlen_k + block_keys - 1) / block_keys;
  const int key_block = blockIdx.x * WARPS_OF_STATES + threadIdx.x / 32;
  if (key_block >= key_blocks) return;
  const int first_row = blockIdx.y * block_rows, first_key = key_block * block_keys;
  const int rows = min(block_rows, seqlen_q - first_row), keys = min(block_keys, seqlen_k - first_key);
  const Range found = seen.template range<true>({batch, batch}, {head, head}, {first_row, first_row + rows - 1},
                                                {first_key, first_key + keys - 1}, lane);
  bool any = found.high, all = found.low, is_known = found.is_one();
  if (!is_known) {
    any = false, all = true, is_known = true;
    for (int from = 0; from < keys && is_known && (all || !any); from += 32) {
      const int key = first_key + min(from + lane, keys - 1);
      const Range part =
          seen.template range<false>({batch, batch}, {head, head}, {first_row, first_row + rows - 1}, {key, key}, lane);
      is_known = __all_sync(ALL_LANES, part.is_one()) != 0;
      any |= __any_sync(ALL_LANES, part.low) != 0, all &= __all_sync(ALL_LANES, part.high) != 0;
    }
    is_known |= any && !all;  // a key that all rows see, and one that none sees
  }
  if (!is_known) {
    // A lane for each row, of which all is read once; of a table of pairs for each key, as neighbours lie together.
    const int outer = Seen::PAIRED ? keys : rows, inner = Seen::PAIRED ? rows : keys;
    any = false, all = true;
    for (int begin = 0; begin < outer && (all || !any); begin += 32) {
      const int place = begin + lane;
      for (int from = 0; from < inner && (all || !any); from += 32) {
        const int to = min(32, inner - from), top = first_row + (Seen::PAIRED ? from : begin),
                  left = first_key + (Seen::PAIRED ? begin : from);
        const Range part =
            seen.template range<true>({batch, batch}, {head, head}, {top, min(top + 31, first_row + rows - 1)},
                                      {left, min(left + 31, first_key + keys - 1)}, lane);
        if (part.is_one()) {
          any |= part.high != 0, all &= part.low != 0;
          continue;
        }
        bool some = false, each = true;
#pragma unroll 8
        for (int i = 0; i < to && place < outer; ++i) {
          const bool shown = Seen::PAIRED ? seen.shows(batch, head, top + i, left + lane)
                                          : seen.shows(batch, head, top + lane, left + i);
          some |= shown, each &= shown;
        }
        any |= __any_sync(ALL_LANES, some) != 0, all &= __all_sync(ALL_LANES, each) != 0;
      }
    }
  }
  const bool whole = rows == block_rows && keys == block_keys;
  if (lane == 0)
    states[(int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * key_blocks + key_block] = !any           ? EMPTY
                                                                                      : all && whole ? FULL
                                                                                                     : PARTIAL;
}

// One list: how many of `length` blocks, `step` bytes from one to the next, are of the kind, their numbers, and behind
// them those of the others, both rising. A warp makes it.
__device__ __forceinline__ void make_list(const uint8_t* states, int length, int step, bool full, int* count,
                                          int* numbers) {
  const int lane = threadIdx.x % 32;
  const uint8_t kind = full ? FULL : PARTIAL;
  auto listed = [&](int at) { return at < length && states[int64_t(at) * step] == kind; };
  int total = 0;
  for (int begin = 0; begin < length; begin += 32) total += __popc(__ballot_sync(ALL_LANES, listed(begin + lane)));
  int before = 0;
  for (int begin = 0; begin < length; begin += 32) {
    const int at = begin + lane;
    const bool is = listed(at);
    const uint32_t all = __ballot_sync(ALL_LANES, is);
    const int rank = before + __popc(all & ((1u << lane) - 1));
    if (at < length) numbers[is ? rank : total + at - rank] = at;
    before += __popc(all);
  }
  if (lane == 0) *count = total;
}

#define FIND_BLOCK_STATES_KERNEL                                                                             \
  extern "C" __global__ void __launch_bounds__(128)                                                          \
      find_block_states(uint8_t* __restrict__ states, int heads, int seqlen_q, int seqlen_k, int block_rows, \
                        int block_keys SEEN_PARAMETERS) {                                                    \
    find_states(Seen{SEEN_ARGUMENTS}, states, heads, seqlen_q, seqlen_k, block_rows, block_keys);            \
  }

// blockIdx.y: by rows or by keys; blockIdx.z: batch and head. Counts [batches * heads, lines], numbers
// [batches * heads, lines, blocks of a line].
extern "C" __global__ void __launch_bounds__(128)
    list_blocks(const uint8_t* __restrict__ states, int row_blocks, int key_blocks, int* kv_num_blocks, int* kv_indices,
                int* full_kv_num_blocks, int* full_kv_indices, int* q_num_blocks, int* q_indices,
                int* full_q_num_blocks, int* full_q_indices) {
  const bool by_keys = blockIdx.y, full = threadIdx.x / 32 % 2;
  const int lines = by_keys ? key_blocks : row_blocks, length = by_keys ? row_blocks : key_blocks;
  const int line = blockIdx.x * (WARPS_OF_LINES / 2) + threadIdx.x / 64;
  if (line >= lines) return;
  const int64_t number = int64_t(blockIdx.z) * lines + line;
  const uint8_t* own =
      states + int64_t(blockIdx.z) * row_blocks * key_blocks + (by_keys ? line : int64_t(line) * key_blocks);
  int* counts = by_keys ? full ? full_q_num_blocks : q_num_blocks : full ? full_kv_num_blocks : kv_num_blocks;
  int* numbers = by_keys ? full ? full_q_indices : q_indices : full ? full_kv_indices : kv_indices;
  make_list(own, length, by_keys ? key_blocks : 1, full, counts + number, numbers + number * length);
}
