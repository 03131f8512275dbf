// sequences.cuh: sequences that are packed end to end, and which of them a tile of ROWS rows is of.
//
// Sequence i, whose rows begin at s_i, has the slots from s_i / ROWS + i on, of which there are at least as many as it
// has tiles, and at most one more. So a slot says its sequence by a search of the places where they begin, without a
// sum over their lengths, and total / ROWS + count slots are enough for all.

//
// Tensor maps of packed tensors slide (tensor_tiles.py): along their rows, as many as the longest sequence has, and
// along their outermost dimension, from a row of the tensor to the next. A sequence takes the last rows at its own end,
// so that rows past it are past the map's last one: they read zero and are not written.

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

  template <int ROWS> __device__ __forceinline__ int first_slot(int sequence) const {
    return int(unsigned(query_starts[sequence]) / ROWS) + sequence;
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
    const int query = query_starts[index], key = key_starts[index];
    return {query, min(query_starts[index + 1] - query, most_queries), key,
            min(key_starts[index + 1] - key, most_keys)};
  }
  // Row `row` of a sequence in a map that slides, whose outermost coordinate, in place of a batch, is the sequence's
  // end.
  __device__ __forceinline__ int query_row(const Sequence& of, int row) const {
    return row + most_queries - of.queries;
  }
  __device__ __forceinline__ Tile query_tile(const Sequence& of, int head) const { return {0, head, of.end_query()}; }
  __device__ __forceinline__ int key_row(const Sequence& of, int row) const { return row + most_keys - of.keys; }
};
