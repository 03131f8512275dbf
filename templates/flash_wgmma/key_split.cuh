// key_split.cuh: blocks take different keys of the same rows, and what they found is added up: by block 0 of a cluster
// through its shared memory, or by any block what others left in global memory. A result of a warpgroup is O before the
// division, shifts and sums: FLOATS + 4 floats per lane, in pieces of 16 bytes that lie lane by lane.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/softmax/wgmma_softmax.cuh"

template <int FLOATS> struct PartialOutput {
  static constexpr int PIECES = FLOATS / 4 + 1;
  static constexpr int BYTES = PIECES * 128 * 16;

  // Into `slot` of another block, where all of it arrives at `barrier`. `thread` of the warpgroup.
  static __device__ __forceinline__ void send(uint32_t slot, uint32_t barrier, const float (&o)[FLOATS],
                                              const RowState& state, int thread) {
    slot += thread * 16;
    store_async_16(slot, barrier, state.shift[0], state.shift[1], state.sum[0], state.sum[1]);
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4)
      store_async_16(slot + (i / 4 + 1) * 128 * 16, barrier, o[i], o[i + 1], o[i + 2], o[i + 3]);
  }

  // O and sums of this lane += those of SLOTS others, all brought to the highest shift: Σ_r 2^(shift_r - shift) O_r.
  // `piece(r, i)` is this lane's piece i of result r.
  template <int SLOTS, typename Piece>
  static __device__ __forceinline__ void add(Piece piece, float (&o)[FLOATS], RowState& state) {
    float4 rows[SLOTS];
    const float own[2] = {state.shift[0], state.shift[1]};
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      rows[slot] = piece(slot, 0);
      state.shift[0] = fmaxf(state.shift[0], rows[slot].x), state.shift[1] = fmaxf(state.shift[1], rows[slot].y);
    }
    const float factor[2] = {exp2_approx(own[0] - state.shift[0]), exp2_approx(own[1] - state.shift[1])};
    state.sum[0] *= factor[0], state.sum[1] *= factor[1];
    scale_rows(o, factor);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const float low = exp2_approx(rows[slot].x - state.shift[0]), high = exp2_approx(rows[slot].y - state.shift[1]);
      state.sum[0] = fmaf(rows[slot].z, low, state.sum[0]), state.sum[1] = fmaf(rows[slot].w, high, state.sum[1]);
#pragma unroll
      for (int i = 0; i < FLOATS; i += 4) {
        const float4 other = piece(slot, i / 4 + 1);
        o[i] = fmaf(other.x, low, o[i]), o[i + 1] = fmaf(other.y, low, o[i + 1]);
        o[i + 2] = fmaf(other.z, high, o[i + 2]), o[i + 3] = fmaf(other.w, high, o[i + 3]);
      }
    }
  }

  // After the last tile, whole warps: block `split` of BLOCKS sends its result to block 0, which adds up all. Returns
  // whether this is it. `slots` of shared memory are for this warpgroup and lie at `slots_smem`; all bytes of all slots
  // arrive at `barrier_smem`.
  template <int BLOCKS>
  static __device__ __forceinline__ bool gather(const unsigned char* slots, uint32_t slots_smem, int slot_bytes,
                                                uint32_t barrier_smem, int split, float (&o)[FLOATS], RowState& state,
                                                int thread) {
    __syncwarp();
    cluster_wait();  // long since: block 0 has begun and its barrier is initialised
    if (split > 0) {
      send(cluster_address(slots_smem + (split - 1) * slot_bytes, 0), cluster_address(barrier_smem, 0), o, state,
           thread);
      return false;
    }
    mbarrier_wait_cluster(barrier_smem, 0);
    auto piece = [&](int slot, int i) {
      return *reinterpret_cast<const float4*>(slots + slot * slot_bytes + (i * 128 + thread) * 16);
    };
    add<BLOCKS - 1>(piece, o, state);
    return true;
  }
  // The same where each block adds up its own columns: to each of BLOCKS its OWN_TILES tiles of 8 columns, of which
  // every BLOCKS-th is one's own, behind the state. All bytes have come when it returns, and so have all blocks.
  template <int BLOCKS, int OWN_TILES>
  static __device__ __forceinline__ void scatter(uint32_t slot_smem, uint32_t barrier_smem, const float (&o)[FLOATS],
                                                 const RowState& state, int thread) {
    __syncwarp();
    cluster_wait();
#pragma unroll
    for (int owner = 0; owner < BLOCKS; ++owner) {
      const uint32_t slot = cluster_address(slot_smem, owner) + thread * 16;
      const uint32_t barrier = cluster_address(barrier_smem, owner);
      store_async_16(slot, barrier, state.shift[0], state.shift[1], state.sum[0], state.sum[1]);
#pragma unroll
      for (int i = 0; i < OWN_TILES; ++i) {  // a last one that is none has the numbers of another
        const int first = 4 * (i * BLOCKS + owner) % FLOATS;
        store_async_16(slot + (i + 1) * 128 * 16, barrier, o[first], o[first + 1], o[first + 2], o[first + 3]);
      }
    }
    mbarrier_wait_cluster(barrier_smem, 0);
  }

  // Into and out of a result of global memory, [PIECES, 128] float4. Another block wrote it in this very kernel: it is
  // not read through L1.
  static __device__ __forceinline__ void leave(float4* result_gmem, const float (&o)[FLOATS], const RowState& state,
                                               int thread) {
    result_gmem += thread;  // once: all pieces have constant offsets from here
    result_gmem[0] = make_float4(state.shift[0], state.shift[1], state.sum[0], state.sum[1]);
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4)
      result_gmem[(i / 4 + 1) * 128] = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
  }
  // Of RESULTS results that were left, `stride` apart: this lane's piece `item` of O, all brought to the highest shift,
  // and the state of its rows.
  template <int RESULTS>
  static __device__ __forceinline__ float4 total(const float4* results_gmem, int stride, int item, RowState& state,
                                                 int thread) {
    // Results whose loads are under way together, at constant offsets from one address.
    constexpr int AT_ONCE = RESULTS < 8 ? RESULTS : RESULTS % 8 == 0 ? 8 : 6;
    static_assert(RESULTS % AT_ONCE == 0, "whole rounds");
    auto round_gmem = [&](int first, int piece) {
      uint64_t address = uint64_t(results_gmem + thread + first * stride + piece * 128);
      forget_origin(address);
      return reinterpret_cast<const float4*>(address);
    };
    state.clear();
#pragma unroll 1
    for (int first = 0; first < RESULTS; first += AT_ONCE) {
      const float4* rows_gmem = round_gmem(first, 0);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float4 rows = __ldcg(rows_gmem + i * stride);
        state.shift[0] = fmaxf(state.shift[0], rows.x), state.shift[1] = fmaxf(state.shift[1], rows.y);
      }
    }
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int first = 0; first < RESULTS; first += AT_ONCE) {
      const float4 *rows_gmem = round_gmem(first, 0), *o_gmem = round_gmem(first, item + 1);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float4 rows = __ldcg(rows_gmem + i * stride), o = __ldcg(o_gmem + i * stride);
        const float low = exp2_approx(rows.x - state.shift[0]), high = exp2_approx(rows.y - state.shift[1]);
        state.sum[0] = fmaf(rows.z, low, state.sum[0]), state.sum[1] = fmaf(rows.w, high, state.sum[1]);
        sum.x = fmaf(o.x, low, sum.x), sum.y = fmaf(o.y, low, sum.y);
        sum.z = fmaf(o.z, high, sum.z), sum.w = fmaf(o.w, high, sum.w);
      }
    }
    return sum;
  }
  // One result more: of_sum += of_more, and by what the sum of those before is multiplied, and what is added to it.
  static __device__ __forceinline__ void take_turn(const RowState& of_more, RowState& of_sum, float (&low)[2],
                                                   float (&own)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float shift = fmaxf(of_more.shift[row], of_sum.shift[row]);
      own[row] = exp2_approx(of_more.shift[row] - shift), low[row] = exp2_approx(of_sum.shift[row] - shift);
      of_sum.sum[row] = fmaf(of_sum.sum[row], low[row], of_more.sum[row] * own[row]);
      of_sum.shift[row] = shift;
    }
  }
  // Of four numbers of rows g, g, g + 8, g + 8.
  static __device__ __forceinline__ float4 turn(float4 sum, float x, float y, float z, float w, const float (&low)[2],
                                                const float (&own)[2]) {
    return make_float4(fmaf(sum.x, low[0], x * own[0]), fmaf(sum.y, low[0], y * own[0]),
                       fmaf(sum.z, low[1], z * own[1]), fmaf(sum.w, low[1], w * own[1]));
  }
  // As `total`, of results `last` down to `first`, each added as by `turn`: the bits are the same whether one
  // block had all keys or several. `piece(r, i)` is this lane's piece i of result r, of which AT_ONCE are loaded.
  template <int AT_ONCE, typename Piece>
  static __device__ __forceinline__ float4 total_in_turn(Piece piece, int first, int last, int item, RowState& state) {
    const float4 begun = piece(last, 0);
    float4 sum = piece(last, item + 1);
    state.shift[0] = begun.x, state.shift[1] = begun.y, state.sum[0] = begun.z, state.sum[1] = begun.w;
#pragma unroll AT_ONCE
    for (int i = last - 1; i >= first; --i) {
      const float4 rows = piece(i, 0), o = piece(i, item + 1);
      float low[2], own[2];
      take_turn(RowState{{rows.x, rows.y}, {rows.z, rows.w}}, state, low, own);
      sum = turn(sum, o.x, o.y, o.z, o.w, low, own);
    }
    return sum;
  }
  static __device__ __forceinline__ void add_left(const float4* result_gmem, float (&o)[FLOATS], RowState& state,
                                                  int thread) {
    result_gmem += thread;
    add<1>([&](int, int i) { return __ldcg(result_gmem + i * 128); }, o, state);
  }
};
