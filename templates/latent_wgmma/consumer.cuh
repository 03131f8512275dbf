// consumer.cuh: the warpgroups that multiply. The first has the scores, the softmax and P, which it hands over in
// shared memory with the factors by which O follows its shift; halves of O's columns are the others' and, of two
// warpgroups, its own too. Needs the constants of latent_wgmma.cu.j2.
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/softmax/wgmma_scores.cuh"
#include "latent_wgmma/half.cuh"

struct Consumer : Half {
  RowOperand<HEAD_DIM, false>& q;
  const float softmax_scale_log2;
  int turn;  // tiles of P so far

  __device__ __forceinline__ Consumer(RowOperand<HEAD_DIM, false>& q, Fragments& f, Ring& ring, Ring& before,
                                      const Work& work, const Output& output, float softmax_scale_log2)
      : Half(f, ring, before, work, output), q(q), softmax_scale_log2(softmax_scale_log2) {}

  __device__ __forceinline__ void run() {
    if constexpr (!SCORES_ALONE) increase_registers<OUTPUT_REGISTERS>();
    begin();
    if constexpr (!SCORES_ALONE) clear();
    if (work.warp / 4 == 0) {
      if constexpr (SCORES_ALONE) increase_registers<SCORE_REGISTERS>();
      make_scores();
      if constexpr (SCORES_ALONE) return;
    } else {
      if constexpr (SCORES_ALONE) increase_registers<OUTPUT_REGISTERS>(), clear();
      take_scores();
    }
    store();
  }

private:
  __device__ __forceinline__ void make_scores() {
    f.factor[0] = f.factor[1] = 1.f;
    f.state.clear();
    turn = 0;
    q.load(work.smem_address, work.warp, work.lane);
    mbarrier_wait(work.smem_address + Smem::Q_FULL, 0);
#pragma unroll
    for (int step = 0; step < Q_STEPS; ++step)
      q.fragment(f.q_frag[step], step, work.smem_address, work.warp, work.lane);
    if constexpr (Q_STEPS > 0) __syncwarp();  // all lanes have read the warp's rows of Q, which its O overwrites
    mbarrier_wait(work.k_full(ring), ring.parity);
    multiply_qk(f.s, ring);
    wgmma_wait<0>();
    pin_registers(f.s);
    if constexpr (OVERLAP) {
      step<true>(work.last_tile == work.first_tile);
#pragma unroll 1
      for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile) step<false>(tile == work.first_tile);
    } else {
      softmax<true>();
#pragma unroll 1
      for (int tile = work.last_tile; tile > work.first_tile; --tile) step_in_turn();
      if constexpr (!SCORES_ALONE) multiply_pv(f.o, f.p, v_tile(before));
    }
    finish_rows();
    if constexpr (!SCORES_ALONE) {
      wgmma_wait<0>();
      pin_registers(f.o);
    }
  }
  __device__ __forceinline__ void multiply_qk(float (&scores)[BLOCK_N / 2], const Ring& at) {  // S = Q Kᵀ
    wgmma_fence();
    forget_origin(q.descriptor);
    const uint64_t k_tile = k_descriptor + descriptor_step(Smem::K_TILE_BYTES) * at.stage;
#pragma unroll
    for (int step = 0; step < Tiles::DIM_STEPS; ++step) {
      const uint64_t k_step = k_tile + descriptor_step(Tiles::step_offset(step, BLOCK_N));
      if (step < Q_STEPS) wgmma_qk_registers(scores, f.q_frag[step < Q_STEPS ? step : 0], k_step, step > 0);
      else wgmma_qk(scores, q[step], k_step, step > 0);
    }
    wgmma_commit();
  }
  // P of these scores, for all warpgroups; O follows the shift.
  template <bool FIRST> __device__ __forceinline__ void softmax() {
    // Only the tile with the last keys, which comes first, may have keys that are hidden, from all rows alike.
    if constexpr (FIRST) mask_scores(f.s, work.last_tile * BLOCK_N, KeysFrom<false>{0, work.keys}, work.lane);
    const bool rescale =
        softmax_tile<RESCALE, LAZY_OCTAVES, 0, FIRST, false>(f.state, f.s, softmax_scale_log2, f.factor, [] {});
    const int p_tile = turn % P_TILES;
    if constexpr (SCORES_ALONE) {
      pack_probabilities<Element>(f.p.frag, f.s);
      if (turn >= P_TILES) named_barrier_sync<CONSUMERS>(P_FREE + p_tile);  // the others have used it and its factors
      f.p.store(p_tile, p_smem, work.warp, work.lane);
    } else {
      if constexpr (!FIRST) named_barrier_sync<CONSUMERS>(P_FREE);
      const float ones[2] = {1.f, 1.f};
      output_to_shared<Element>(f.s, ones, p_smem, work.warp, work.lane);
      pack_probabilities<Element>(f.p.frag, f.s);
    }
    if constexpr (!FIRST) {
      if (!rescale) f.factor[0] = f.factor[1] = 1.f;
      if (work.lane % 4 == 0) factors[p_tile * 64 + row] = f.factor[0], factors[p_tile * 64 + row + 8] = f.factor[1];
    }
    if constexpr (!SCORES_ALONE) fence_proxy_async();  // wgmma reads it there
    named_barrier_arrive<CONSUMERS>(P_READY + p_tile);
    if (!FIRST && !SCORES_ALONE && rescale) scale_rows(f.o, f.factor);
    ++turn;
    before = ring;
    ring.advance();
  }
  // OVERLAP: the softmax of a tile of keys beside Q Kᵀ of the next. `last`: of its own once more, for nothing: ptxas
  // would wait at a branch around a product.
  template <bool FIRST> __device__ __forceinline__ void step(bool last) {
    Ring behind = ring;
    if (!last) behind.advance(), mbarrier_wait(work.k_full(behind), behind.parity);
    multiply_qk(f.next, behind);
    softmax<FIRST>();
    if constexpr (SCORES_ALONE) {
      wgmma_wait<0>();
      pin_registers(f.next);
    } else {
      pin_registers(f.o);  // rescaled before the product's fence
      multiply_pv(f.o, f.p, v_tile(before));
      wgmma_wait<0>();
      pin_registers(f.o), pin_registers(f.next);
      release(before);
    }
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) f.s[i] = f.next[i];
  }
  // Q Kᵀ of the next tile of keys, behind P V of this one, then its softmax.
  __device__ __forceinline__ void step_in_turn() {
    if constexpr (!SCORES_ALONE) multiply_pv(f.o, f.p, v_tile(before));
    mbarrier_wait(work.k_full(ring), ring.parity);
    multiply_qk(f.s, ring);
    if constexpr (!SCORES_ALONE) {
      wgmma_wait<1>();
      pin_registers(f.o);
      release(before);
    }
    wgmma_wait<0>();
    pin_registers(f.s);
    softmax<false>();
  }
  // Row sums and shifts to whom they concern.
  __device__ __forceinline__ void finish_rows() {
    if (work.splits == 1) {
      inverse_sums(f.state, work.terms, 0, f.inverse);
      if constexpr (WRITE_LSE) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = row_sum(f.state, i);
          const int64_t head =
              int64_t(work.batch) * work.kv_heads * work.group_heads + work.first_head + row + 8 * i;  // of all batches
          if (work.lane % 4 == 0 && row + 8 * i < work.heads)
            lse_gmem[head * work.seqlen_q + work.query] = log_sum(f.state.shift[i], sum);
        }
      }
      if (work.lane % 4 == 0) inverses[row] = f.inverse[0], inverses[row + 8] = f.inverse[1];
      named_barrier_arrive<CONSUMERS>(ROWS_DONE);
    } else {
      const float sum[2] = {row_sum(f.state, 0), row_sum(f.state, 1)};
      float2* rows_gmem = state_gmem + work.result() * 64 + row;
      if (work.lane % 4 == 0)
        rows_gmem[0] = make_float2(f.state.shift[0], sum[0]), rows_gmem[8] = make_float2(f.state.shift[1], sum[1]);
    }
  }
};
