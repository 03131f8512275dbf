// output_sums.cuh: what a consumer warpgroup holds, and how O is summed up: by tensor cores, of their sums in fp32, and
// of parts of the keys. Needs the constants of flash_wgmma.cu.j2.
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/softmax/wgmma_softmax.cuh"
#include "flash_wgmma/epilogue.cuh"
#include "flash_wgmma/key_scales.cuh"

// What a warpgroup holds in arrays. They lie apart from a consumer's numbers: the compiler takes an object to registers
// as a whole, and one with an array only once the loops over it are unrolled, which costs registers.
struct Fragments {
  float s[BLOCK_N / 2];                               // scores, then probabilities, of a tile
  uint32_t pairs[Operands::PAIRS ? BLOCK_N / 4 : 1];  // PAIRS: the same in fp16, as products make them
  uint32_t p[KEY_STEPS][4];                           // probabilities of a tile, rounded
  float next[BLOCK_N / 2];                            // SCORES_AHEAD: scores of the tile behind it
  float o[OUT_DIM / 2];
  float added[VALUE_SUMS][SUMS];  // TWO_LEVELS, not SUM_IN_SHARED: P V of the last tiles
  float factor[2];                // by which the last softmax wants O rescaled
  float o_factor[2];              // TWO_LEVELS: by which O without `sum` must be multiplied
  float between[2];               // TWO_TILES: the same, once P V of the one behind is there
  RowState state;
  RowState of_parts;                                        // KEEPS: their shifts and sums
  HeadTerms<Element> head_terms[GROUP_ROWS ? 2 : 1];        // of this tile of rows, of the lane's rows g and g + 8
  BiasPair<Element> bias[Terms::BIASED ? BLOCK_N / 4 : 1];  // of the next tile of keys
  float inverse[2];                                         // of the sums of a tile of rows
  KeyScales<Scales::BY_KEY ? BLOCK_N : 1> key_scales;
  SeenKeys<2, BLOCK_N> seen;  // of a PARTIAL tile of keys, by the lane's rows g and g + 8
};

// What tensor cores add P V to.
template <class F>
__device__ __forceinline__ float (&accumulators(F& f))[SUMS] {  // written out: nvcc sees no body on the host
  if constexpr (TWO_LEVELS && !SUM_IN_SHARED) return f.added[0];
  else return f.o;
}

struct OutputSums : Epilogue {
  static constexpr bool HAS_COLUMNS = true;  // some of O are this warpgroup's
  float (&o)[OUT_DIM / 2];
  float (&sum)[SUMS];                // that tensor cores add P V to
  float (&added)[VALUE_SUMS][SUMS];  // of parts of the columns of V: the first is `sum`
  float (&factor)[2], (&o_factor)[2];
  RowState& of_parts;
  int tiles_added;  // SUM_IN_SHARED: whose P V are in `sum`
  bool flushed;     // O_IN_SHARED: some are in shared memory
  bool fresh;       // IN_PARTS: O of this part is nothing yet

  __device__ __forceinline__ OutputSums(Fragments& f, const TileScheduler& work, const Output& output)
      : Epilogue(work, output, f.inverse),
        o(f.o),
        sum(accumulators(f)),
        added(f.added),
        factor(f.factor),
        o_factor(f.o_factor),
        of_parts(f.of_parts) {}

  // Four numbers of this thread's part of O in memory.
  __device__ __forceinline__ float4& kept(int i) {
    if constexpr (PARTS_IN_GLOBAL) {
      const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      return results_gmem[((block * WARPGROUPS + warpgroup) * COLUMN_TILES + i) * 128 + thread_read_again()];
    }
    return reinterpret_cast<float4*>(smem + Smem::SUMS + warpgroup * Smem::SUM_BYTES)[i * 128 + thread];
  }
  template <int FLOATS>
  __device__ __forceinline__ float4 kept_and_added(int i, const float (&more)[FLOATS]) {  // of rows g, g, g + 8, g + 8
    const float4 before = kept(i);
    return make_float4(fmaf(before.x, o_factor[0], more[4 * i]), fmaf(before.y, o_factor[0], more[4 * i + 1]),
                       fmaf(before.z, o_factor[1], more[4 * i + 2]), fmaf(before.w, o_factor[1], more[4 * i + 3]));
  }
  // What tensor cores add P V of a part of its columns to.
  template <int PART = 0> __device__ __forceinline__ float (&sum_of())[SUMS] {
    if constexpr (PART % VALUE_SUMS > 0) return added[PART % VALUE_SUMS];
    else return sum;
  }
  // To O in registers, or a part of its columns.
  template <int PART = 0> __device__ __forceinline__ void add_to_output() {
    constexpr int ADDED = OUT_DIM / VALUE_PARTS / 2;
    const float(&of_part)[SUMS] = sum_of<PART>();
#pragma unroll
    for (int i = 0; i < ADDED; ++i) o[PART * ADDED + i] = fmaf(o[PART * ADDED + i], o_factor[i / 2 % 2], of_part[i]);
  }
  // SUM_IN_SHARED: what tensor cores have added up, in fewer bits than fp32, to O.
  __device__ __forceinline__ void flush() {
    if (PERSISTENT && !flushed) wait_for_sums();
#pragma unroll
    for (int i = 0; i < OUT_DIM / 8; ++i)
      kept(i) =
          flushed ? kept_and_added(i, sum) : make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    o_factor[0] = o_factor[1] = 1.f;
    tiles_added = 0, flushed = true;
  }
  // TWO_LEVELS: P V of a tile is there.
  __device__ __forceinline__ void add_up() {
    if constexpr (SUM_IN_SHARED) {
      if (++tiles_added == FLUSH_TILES) flush();
    } else {
      add_to_output<VALUE_PARTS - 1>();
      if constexpr (RESCALE != Rescale::ALWAYS) o_factor[0] = o_factor[1] = 1.f;
    }
  }
  __device__ __forceinline__ void rescale_output() {
    if constexpr (SUM_IN_SHARED) {
      if (tiles_added > 0) scale_rows(sum, factor);
      pin_registers(sum);  // before the fence of the next product
      o_factor[0] *= factor[0], o_factor[1] *= factor[1];
    } else if constexpr (TWO_LEVELS) {
      o_factor[0] = factor[0], o_factor[1] = factor[1];
    } else {
      scale_rows(o, factor);
    }
  }
  // TWO_LEVELS: all P V of a tile of rows are in o, and the sums of P in `of`.
  __device__ __forceinline__ void complete_output(RowState& of) {
    if constexpr (SUM_IN_SHARED) {
      const bool more = tiles_added > 0;
      if (flushed) {
#pragma unroll
        for (int i = 0; i < OUT_DIM / 2; ++i) o[i] = more ? o[i] : 0.f;
#pragma unroll
        for (int i = 0; i < OUT_DIM / 8; ++i) {
          const float4 all = kept_and_added(i, o);
          o[4 * i] = all.x, o[4 * i + 1] = all.y, o[4 * i + 2] = all.z, o[4 * i + 3] = all.w;
        }
      }
      named_barrier_sync<128>(O_TILE + warpgroup);  // O in Element takes the place of all these sums
    }
  }
  template <bool FIRST, class Scores>
  __device__ __forceinline__ void round_probabilities(uint32_t (&p)[KEY_STEPS][4], Scores& s, bool) {
    Operands::pack(p, s);
  }
  __device__ __forceinline__ void hand_over() {}  // P of the tile before, beside Q Kᵀ
  // What needs the sums of a tile of rows and not O, beside the last product.
  __device__ __forceinline__ void end_sums(const RowState& of_rows) {
    if constexpr (INVERSE_BESIDE) make_inverse(of_rows, work.tile, lane_row(work.tile));
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < OUT_DIM / 2; ++i) o[i] = 0.f;
    o_factor[0] = o_factor[1] = 1.f;
    tiles_added = 0, fresh = false;
    if constexpr (!KEEPS) flushed = false;
  }
  // KEEPS: the parts that are over, which hold none yet.
  __device__ __forceinline__ void clear_parts() {
    if constexpr (KEEPS) of_parts.clear(), flushed = false;
  }
  // O of the tile of rows before has left the memory of sums.
  __device__ __forceinline__ void wait_for_sums() const {
    if (STORE != Store::ROWS && thread == 0) tma_store_wait_read();
    named_barrier_sync<128>(O_TILE + warpgroup);
  }
  // SHARES_PARTS: the sum of the parts behind these keys, if another block has them.
  __device__ __forceinline__ void take_parts(const KeyRange& of_keys) {
    if constexpr (SHARES_PARTS) {
      if (!of_keys.takes()) return;
      const int giver = ((blockIdx.y - 1) * gridDim.x + blockIdx.x) * WARPGROUPS + warpgroup;
      if (thread == 0) take(counters_zeroed + giver);
      wait_for_sums();  // and all threads may read what thread 0 has acquired
      const float4* result_gmem = results_gmem + giver * Partial::PIECES * 128 + thread;
      const float4 of_rows = __ldcg(result_gmem);
      of_parts = RowState{{of_rows.x, of_rows.y}, {of_rows.z, of_rows.w}};
#pragma unroll
      for (int i = 0; i < OUT_DIM / 8; ++i) kept(i) = __ldcg(result_gmem + (i + 1) * 128);
      flushed = true;
    }
  }
  // KEEPS: O of a part, to those that are over.
  __device__ __forceinline__ void keep_part(const RowState& of_part) {
    if (flushed) {
      float low[2], own[2];
      Partial::take_turn(of_part, of_parts, low, own);
#pragma unroll
      for (int i = 0; i < OUT_DIM / 8; ++i)
        kept(i) = Partial::turn(kept(i), o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3], low, own);
    } else {  // the first: nothing is to be added
      if (PERSISTENT && O_IN_SHARED) wait_for_sums();
      of_parts = of_part;
#pragma unroll
      for (int i = 0; i < OUT_DIM / 8; ++i) kept(i) = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    flushed = true;
  }
  // KEEPS: O of the last part and of all others, and `of` of these rows.
  __device__ __forceinline__ void add_parts(RowState& of) {
    if constexpr (KEEPS) {
      float low[2], own[2];
      Partial::take_turn(of, of_parts, low, own);
      if (flushed) {
#pragma unroll
        for (int i = 0; i < OUT_DIM / 8; ++i) {
          const float4 all = Partial::turn(kept(i), o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3], low, own);
          o[4 * i] = all.x, o[4 * i + 1] = all.y, o[4 * i + 2] = all.z, o[4 * i + 3] = all.w;
        }
        if (O_IN_SHARED) named_barrier_sync<128>(O_TILE + warpgroup);  // O in Element takes the place of these sums
      }
      of = of_parts;
      clear_parts();
    }
  }
};
