// query_rows.cuh: what becomes of rows of queries before and behind the main work: terms of them and zeros for their
// dQ, at last rows of dQ. Launches of their own do it, or, ROWS_INSIDE, but for the first and the last heads, warps of
// the main launch that have nothing else to do. Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/flags.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/ptx/warp.cuh"
#include "backward_wgmma/query_sums.cuh"
#include "device/backward/row_terms.cuh"
#include "device/schedule/sequences.cuh"
#include "backward_wgmma/query_walk.cuh"

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

  // Of a tile of queries; heads count through all batches. `thread` of THREADS.
  template <int THREADS> __device__ __forceinline__ void begin(int head_of_all, int tile, int thread) const {
    const int batch = head_of_all / heads, head = head_of_all % heads, row = first_query + tile * BLOCK_M;
    const int64_t place = int64_t(head_of_all) * tiles + first_slot + tile;
    const int64_t sum = int64_t(head_of_all) * head_rows + row;
    using Deltas = RowDeltas<Element, BLOCK_M, VALUE_DIM, THREADS, true, ROWS_AT_ONCE>;
    if (VARLEN && tile * BLOCK_M >= seqlen_q) {
      Deltas::write_none(log_sums_gmem + place * BLOCK_M, deltas_gmem + place * BLOCK_M);
      return;
    }
    Sums::clear(dq_sums_gmem + place * Sums::FLOATS, thread, THREADS);
    Deltas::write(log_sums_gmem + place * BLOCK_M, deltas_gmem + place * BLOCK_M, o_gmem + o.first(batch, head, row),
                  o.row, do_gmem + d.first(batch, head, row), d.row, lse_gmem + sum,
                  LSE_GRADIENT ? dlse_gmem + sum : nullptr, seqlen_q - tile * BLOCK_M, thread);
  }
  // The terms alone, to where they are read, in shared memory.
  template <int THREADS>
  __device__ __forceinline__ void terms_to(float* log_sums, float* deltas, int head_of_all, int tile,
                                           int thread) const {
    const int batch = head_of_all / heads, head = head_of_all % heads, row = tile * BLOCK_M;
    const int64_t sum = int64_t(head_of_all) * head_rows + row;
    RowDeltas<Element, BLOCK_M, VALUE_DIM, THREADS, true, ROWS_AT_ONCE>::write(
        log_sums, deltas, o_gmem + o.first(batch, head, row), o.row, do_gmem + d.first(batch, head, row), d.row,
        lse_gmem + sum, LSE_GRADIENT ? dlse_gmem + sum : nullptr, seqlen_q - row, thread);
  }
  // Ahead of it, for few threads, which would wait long for each of their rows.
  template <int THREADS> __device__ __forceinline__ void prefetch(int head_of_all, int tile, int thread) const {
    constexpr int LINES = (VALUE_DIM * 2 + 127) / 128;  // of a row
    const int batch = head_of_all / heads, head = head_of_all % heads, row = tile * BLOCK_M;
    const int rows = min(BLOCK_M, seqlen_q - row);
#pragma unroll 1
    for (int i = thread; i < rows * LINES; i += THREADS) {
      prefetch_to_l2(o_gmem + o.first(batch, head, row + i / LINES) + i % LINES * 64);
      prefetch_to_l2(do_gmem + d.first(batch, head, row + i / LINES) + i % LINES * 64);
    }
    if (thread * 32 < rows) prefetch_to_l2(lse_gmem + int64_t(head_of_all) * seqlen_q + row + thread * 32);
  }
  template <int THREADS> __device__ __forceinline__ void end(int head_of_all, int tile, int thread) const {
    const int batch = head_of_all / heads, head = head_of_all % heads, row = first_query + tile * BLOCK_M;
    const int64_t place = int64_t(head_of_all) * tiles + first_slot + tile;
    Sums::template to_rows<HEAD_DIM, ROWS_AT_ONCE>(dq_sums_gmem + place * Sums::FLOATS,
                                                   dq_gmem + dq.first(batch, head, row), dq.row,
                                                   seqlen_q - tile * BLOCK_M, softmax_scale, thread, THREADS);
  }
};

// How far the rows of each K/V head are, all batches' heads behind one another: words in global memory that warps add
// to. Warps wait for those of blocks of lower numbers alone, which begin earlier (hand_over.cuh), and wait for nothing
// in return but for such blocks themselves.
struct RowProgress {
  uint32_t* begun_gmem;  // [K/V heads]: ROW_WARPS of each block that begins rows of the head
  int units;             // K/V heads of all batches
  int lead;              // a block begins rows of so many K/V heads ahead, and ends those of so many behind

  __device__ __forceinline__ uint32_t* begun(int unit) const { return begun_gmem + unit; }
  __device__ __forceinline__ uint32_t* added(int unit) const { return begun_gmem + units + unit; }  // dQ's adders

  // By one thread, after __syncwarp behind what the warp did.
  static __device__ __forceinline__ void report(uint32_t* word_gmem) { release_one(word_gmem); }
  // By one thread, before __syncwarp.
  static __device__ __forceinline__ void await(const uint32_t* word_gmem, uint32_t reports) {
    while (acquire(word_gmem) < reports) {}
  }
  // Before the main launch: the first heads are begun, by launches.
  __device__ __forceinline__ void clear(int thread, int threads, uint32_t reports) const {
    for (int i = thread; i < 2 * units; i += threads) begun_gmem[i] = i < lead ? reports : 0;
  }
};

// The rows that the spare warps of a block take: those of a K/V head are shared out to the blocks of its first key
// tiles: of all, or, where these have more queries than the others, of half of them.
struct SpareWarps {
  const QueryRows& rows;
  const RowProgress& progress;
  int unit, group, block, blocks;  // K/V head, its heads, this block of its blocks

  // Of so many blocks.
  static __device__ __forceinline__ int sharers(int blocks) {
    return CAUSAL && !Mask::WINDOW ? (blocks + 1) / 2 : blocks;
  }

  __device__ __forceinline__ void run(int thread) const {
    if (block >= sharers(blocks)) return;
    grid_dependency_wait();
    if (unit + progress.lead < progress.units) {
      for_tiles(unit + progress.lead, [&](int head, int tile) { rows.prefetch<32 * ROW_WARPS>(head, tile, thread); });
      for_tiles(unit + progress.lead, [&](int head, int tile) { rows.begin<32 * ROW_WARPS>(head, tile, thread); });
      __syncwarp();
      if (thread % 32 == 0) RowProgress::report(progress.begun(unit + progress.lead));
    }
    if (unit >= progress.lead) {
      if (thread % 32 == 0) RowProgress::await(progress.added(unit - progress.lead), blocks * ADDERS);
      __syncwarp();
      for_tiles(unit - progress.lead, [&](int head, int tile) { rows.end<32 * ROW_WARPS>(head, tile, thread); });
    }
  }

private:
  template <class Do> __device__ __forceinline__ void for_tiles(int of_unit, Do&& what) const {
#pragma unroll 1
    for (int i = block; i < group * rows.tiles; i += sharers(blocks))
      what(of_unit * group + i / rows.tiles, i % rows.tiles);
  }
};
