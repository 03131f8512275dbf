// key_work.cuh: what a block of backward_wgmma works on at a time: a tile of keys, or a part of its queries. A block
// has one, or, CLAIMED, claims one after another: the producer claims and tells the other warps. Needs the constants of
// backward_wgmma.cu.j2.
#include "device/ptx/flags.cuh"
#include "device/ptx/read_again.cuh"
#include "device/schedule/sequences.cuh"
#include "backward_wgmma/block_place.cuh"
#include "backward_wgmma/query_walk.cuh"

// Packed sequences by their tiles of queries.
__device__ __forceinline__ PackedSequences packed_queries(const Variant& variant, int seqlen_q, int seqlen_k) {
  const auto& given = variant.given;
  return {given.query_starts, given.key_starts, given.sequences, seqlen_q, seqlen_k};
}

struct KeyWork {
  Sequence sequence;
  int sequence_number;  // of packed sequences, else the batch
  int first_slot;       // of the packed sequence, else 0
  int64_t sums;         // QUERY_SPLIT > 1: number of the part among all
  bool any;             // VARLEN: a slot may have no keys
  Mask mask;
  KeyBlock block;
};

struct KeyWorks {
  Variant& variant;
  BlockStates states;
  int seqlen_q, seqlen_k, kv_heads;
  int number;  // of `BlockPlace`
  int blocks;  // CLAIMED: all that there are

  // WHOLE_HEADS: tiles of keys that are claimed together, of a head.
  __device__ __forceinline__ int at_once() const { return WHOLE_HEADS ? (seqlen_k + BLOCK_N - 1) / BLOCK_N : 1; }
  // What a block begins with.
  __device__ __forceinline__ int first() const { return blockIdx.x * at_once(); }
  __device__ __forceinline__ KeyWork at(int of) const {
    Sequence sequence{0, seqlen_q, 0, seqlen_k};
    const BlockPlace place(seqlen_k, kv_heads, number, of, blocks);
    int key_tile = place.tile, first_slot = 0, sequence_number = place.batch;
    if constexpr (VARLEN) {
      const PackedSequences by_queries = packed_queries(variant, seqlen_q, seqlen_k);
      const PackedSequences by_keys{by_queries.key_starts, by_queries.query_starts, by_queries.count, seqlen_k,
                                    seqlen_q};
      sequence_number = by_keys.at_slot<BLOCK_N>(key_tile);
      sequence = by_queries.at(sequence_number);
      key_tile -= by_keys.first_slot<BLOCK_N>(sequence_number);
      first_slot = by_queries.first_slot<BLOCK_M>(sequence_number);
      variant.given.diagonal = CAUSAL && !CAUSAL_LOWER_RIGHT ? 0 : sequence.keys - sequence.queries;
    }
    const Mask mask(sequence.queries, sequence.keys, variant.given.window);
    const bool any = !VARLEN || key_tile * BLOCK_N < sequence.keys;
    return {sequence, sequence_number, first_slot, place.sums, any, mask, KeyBlock(mask, place, key_tile, states)};
  }
};
