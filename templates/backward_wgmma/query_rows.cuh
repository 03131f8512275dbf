// query_rows.cuh: what becomes of rows of queries before and behind the main work: terms of them and zeros for their
// dQ, at last rows of dQ. Launches of their own do it. Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/element.cuh"
#include "backward_wgmma/query_sums.cuh"
#include "device/backward/row_terms.cuh"
#include "device/schedule/sequences.cuh"

struct RowStrides {
  int64_t batch, head, row;
  __device__ __forceinline__ int64_t first(int of_batch, int of_head, int of_row) const {
    return of_batch * batch + of_head * head + of_row * row;
  }
};

struct QueryRows {
  const Element *o_gmem, *do_gmem;
  const float *lse_gmem, *dlse_gmem;
  float *log_sums_gmem, *deltas_gmem, *dq_sums_gmem;
  Element* dq_gmem;
  RowStrides o, d, dq;
  int heads, seqlen_q, tiles;  // tiles of queries of a head, or slots of packed sequences
  float softmax_scale;
  int head_rows;                        // of the log-sum-exps
  int first_query = 0, first_slot = 0;  // of the sequence at hand

  // Goes over to the packed sequence that has a slot. Returns which tile of it the slot is.
  __device__ __forceinline__ int take(const PackedSequences& packed, int slot, int total_queries) {
    const int number = packed.at_slot<BLOCK_M>(slot);
    const Sequence sequence = packed.at(number);
    seqlen_q = sequence.queries, head_rows = total_queries;
    first_query = sequence.first_query, first_slot = packed.first_slot<BLOCK_M>(number);
    return slot - first_slot;
  }

  // Of a tile of queries; heads count through all batches. `thread` of THREADS. `seqlen_k`, `window`: of the sequence.
  template <int THREADS>
  __device__ __forceinline__ void begin(int head_of_all, int tile, int thread, int seqlen_k,
                                        const Window& window) const {
    const int batch = head_of_all / heads, head = head_of_all % heads, row = first_query + tile * BLOCK_M;
    const int64_t place = int64_t(head_of_all) * tiles + first_slot + tile;
    const int64_t sum = int64_t(head_of_all) * head_rows + row;
    using Deltas = RowDeltas<Element, BLOCK_M, VALUE_DIM, THREADS, true, ROWS_AT_ONCE>;
    if (VARLEN && tile * BLOCK_M >= seqlen_q) {
      Deltas::write_none(log_sums_gmem + place * BLOCK_M, deltas_gmem + place * BLOCK_M, thread);
      return;
    }
    if (!WHOLE_HEADS &&
        (!FIRST_STORES || (SOME_SEE_NONE && !is_seen(tile, Mask(seqlen_q, seqlen_k, window), seqlen_k))))
      Sums::clear<HEAD_DIM>(dq_sums_gmem + place * Sums::FLOATS, seqlen_q - tile * BLOCK_M, thread, THREADS);
    Deltas::write(log_sums_gmem + place * BLOCK_M, deltas_gmem + place * BLOCK_M, o_gmem + o.first(batch, head, row),
                  o.row, do_gmem + d.first(batch, head, row), d.row, lse_gmem + sum,
                  LSE_GRADIENT ? dlse_gmem + sum : nullptr, seqlen_q - tile * BLOCK_M, thread);
  }
  // Whether a block comes to a tile of queries, which `KeyBlock` says: those that do are side by side.
  static __device__ __forceinline__ bool is_seen(int tile, const Mask& mask, int seqlen_k) {
    return seqlen_k > 0 && tile >= mask.first_query(0) / BLOCK_M && tile * BLOCK_M < mask.end_query(seqlen_k - 1);
  }
  // The terms alone of `count` queries of a head, from `row` on, to where they are read, in shared memory.
  template <int THREADS>
  __device__ __forceinline__ void terms_to(float* log_sums, float* deltas, int batch, int head, int row, int count,
                                           int thread) const {
    constexpr int BESIDE = RowDeltas<Element, BLOCK_M, VALUE_DIM, THREADS>::ROWS_BESIDE;
    using Deltas = RowDeltas<Element, BLOCK_M, VALUE_DIM, THREADS, true, (BLOCK_N > BESIDE ? BLOCK_N / BESIDE : 1)>;
    const int64_t sum = (int64_t(batch) * heads + head) * head_rows + row;
    Deltas::write(log_sums, deltas, o_gmem + o.first(batch, head, row), o.row, do_gmem + d.first(batch, head, row),
                  d.row, lse_gmem + sum, LSE_GRADIENT ? dlse_gmem + sum : nullptr, seqlen_q - row, thread, count);
  }
  template <int THREADS> __device__ __forceinline__ void end(int head_of_all, int tile, int thread) const {
    const int batch = head_of_all / heads, head = head_of_all % heads, row = first_query + tile * BLOCK_M;
    const int64_t place = int64_t(head_of_all) * tiles + first_slot + tile;
    Sums::template to_rows<HEAD_DIM, ROWS_AT_ONCE>(dq_sums_gmem + place * Sums::FLOATS,
                                                   dq_gmem + dq.first(batch, head, row), dq.row,
                                                   seqlen_q - tile * BLOCK_M, softmax_scale, thread, THREADS);
  }
};
