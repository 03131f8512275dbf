// sequences.cuh: sequences that are packed end to end, and which of them a tile of ROWS rows is of.
//
// Sequence i, whose rows begin s_i behind those of the first, has the slots from s_i / ROWS + i on, of which there are
// at least as many as it has tiles, and at most one more. So a slot says its sequence by a search of the places where
// they begin, without a sum over their lengths, and total / ROWS + count slots are enough for all.

#include "device/schedule/tile_order.cuh"

// Where a sequence lies in the packed tensors.
struct Sequence {
  int first_query, queries, first_key, keys;

  __device__ __forceinline__ int end_query() const { return first_query + queries; }
  __device__ __forceinline__ int end_key() const { return first_key + keys; }
};

struct PackedSequences {
  const int *query_starts, *key_starts;  // [count + 1], cu_seqlens of flash-attention
  int count, most_queries, most_keys;    // no sequence is longer: more of it is cut off
  int row_bits = 0;                      // a query has 2^row_bits rows
  const int* keys_used = nullptr;        // [count] where keys lie in pages: how many there are, and no `key_starts`

  // One that ends before it begins has no rows.
  static __device__ __forceinline__ int length(const int* starts, int index, int most) {
    return max(0, min(starts[index + 1] - starts[index], most));
  }

  template <int ROWS> __device__ __forceinline__ int first_slot(int sequence) const {
    return int((unsigned(query_starts[sequence] - query_starts[0]) << row_bits) / ROWS) + sequence;
  }
  // The last sequence that begins at `slot` or before.
  template <int ROWS> __device__ __forceinline__ int at_slot(int slot) const {
    int first = 0, end = count;
    while (end - first > 1) {
      const int middle = (first + end) / 2;
      if (first_slot<ROWS>(middle) <= slot) first = middle;
      else end = middle;
    }
    return first;
  }
  __device__ __forceinline__ Sequence at(int index) const {
    const int first_query = query_starts[index], queries = length(query_starts, index, most_queries);
    if (keys_used) return {first_query, queries, 0, max(0, min(keys_used[index], most_keys))};
    return {first_query, queries, key_starts[index], length(key_starts, index, most_keys)};
  }
};
