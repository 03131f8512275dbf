  // scores.cuh, a part of the kernel's body: the first warpgroup goes through its tiles of keys: scores, the softmax, P
  // for all warpgroups, and its half of O if it has one. Row sums and shifts go to whom they concern.
  float s[BLOCK_N / 2], factor[2] = {1.f, 1.f};
  RegisterP p;
  RowState state;
  state.clear();
  RowOperand<HEAD_DIM, false> q;
  q.load(work.smem_address, work.warp, work.lane);
  mbarrier_wait(work.smem_address + Smem::Q_FULL, 0);
  uint32_t q_frag[Q_STEPS > 0 ? Q_STEPS : 1][4];  // of the first steps
#pragma unroll
  for (int step = 0; step < Q_STEPS; ++step) q.fragment(q_frag[step], step, work.smem_address, work.warp, work.lane);
  if constexpr (Q_STEPS > 0) __syncwarp();  // all lanes have read the warp's rows of Q, which its O overwrites
  auto multiply_qk = [&](float(&scores)[BLOCK_N / 2], const Ring& at) {  // S = Q Kᵀ
    wgmma_fence();
    forget_origin(q.descriptor);
    const uint64_t k_tile = k_descriptor + descriptor_step(Smem::K_TILE_BYTES) * at.stage;
#pragma unroll
    for (int step = 0; step < Tiles::DIM_STEPS; ++step) {
      const uint64_t k_step = k_tile + descriptor_step(Tiles::step_offset(step, BLOCK_N));
      if (step < Q_STEPS) wgmma_qk_registers(scores, q_frag[step < Q_STEPS ? step : 0], k_step, step > 0);
      else wgmma_qk(scores, q[step], k_step, step > 0);
    }
    wgmma_commit();
  };
  int turn = 0;  // tiles of P so far
  // P of these scores, for all warpgroups; O follows the shift.
  auto softmax = [&](auto first) {
    constexpr bool FIRST = decltype(first)::value;
    // Only the tile with the last keys, which comes first, may have keys that are hidden, from all rows alike.
    if constexpr (FIRST) mask_scores(s, work.last_tile * BLOCK_N, KeysFrom<false>{0, work.keys}, work.lane);
    const bool rescale =
        softmax_tile<RESCALE, LAZY_OCTAVES, 0, FIRST, false>(state, s, softmax_scale_log2, factor, [] {});
    const int p_tile = turn % P_TILES;
    if constexpr (SCORES_ALONE) {
      pack_probabilities<Element>(p.frag, s);
      if (turn >= P_TILES) named_barrier_sync<CONSUMERS>(P_FREE + p_tile);  // the others have used it and its factors
      p.store(p_tile, p_smem, work.warp, work.lane);
    } else {
      if constexpr (!FIRST) named_barrier_sync<CONSUMERS>(P_FREE);
      const float ones[2] = {1.f, 1.f};
      output_to_shared<Element>(s, ones, p_smem, work.warp, work.lane);
      pack_probabilities<Element>(p.frag, s);
    }
    if constexpr (!FIRST) {
      if (!rescale) factor[0] = factor[1] = 1.f;
      if (work.lane % 4 == 0) factors[p_tile * 64 + row] = factor[0], factors[p_tile * 64 + row + 8] = factor[1];
    }
    if constexpr (!SCORES_ALONE) fence_proxy_async();  // wgmma reads it there
    named_barrier_arrive<CONSUMERS>(P_READY + p_tile);
    if (!FIRST && !SCORES_ALONE && rescale) scale_rows(o, factor);
    ++turn;
    before = ring;
    ring.advance();
  };
  mbarrier_wait(work.k_full(ring), ring.parity);
  multiply_qk(s, ring);
  wgmma_wait<0>();
  pin_registers(s);
  if constexpr (OVERLAP) {
    float next[BLOCK_N / 2];  // scores of the tile behind that of S
    // `last`: its own scores once more, for nothing. ptxas would wait at a branch around a product.
    auto step = [&](auto first, bool last) {
      Ring behind = ring;
      if (!last) behind.advance(), mbarrier_wait(work.k_full(behind), behind.parity);
      multiply_qk(next, behind);
      softmax(first);
      if constexpr (SCORES_ALONE) {
        wgmma_wait<0>();
        pin_registers(next);
      } else {
        pin_registers(o);  // rescaled before the product's fence
        multiply_pv(o, p, v_tile(before));
        wgmma_wait<0>();
        pin_registers(o), pin_registers(next);
        release(before);
      }
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = next[i];
    };
    step(True{}, work.last_tile == work.first_tile);
#pragma unroll 1
    for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile) step(False{}, tile == work.first_tile);
  } else {
    softmax(True{});
#pragma unroll 1
    for (int tile = work.last_tile; tile > work.first_tile; --tile) {
      if constexpr (!SCORES_ALONE) multiply_pv(o, p, v_tile(before));
      mbarrier_wait(work.k_full(ring), ring.parity);
      multiply_qk(s, ring);  // of the next tile, behind P V of this one
      if constexpr (!SCORES_ALONE) {
        wgmma_wait<1>();
        pin_registers(o);
        release(before);
      }
      wgmma_wait<0>();
      pin_registers(s);
      softmax(False{});
    }
    if constexpr (!SCORES_ALONE) multiply_pv(o, p, v_tile(before));
  }
  if (work.splits == 1) {
    inverse_sums(state, work.terms, 0, inverse);
    if constexpr (WRITE_LSE) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = row_sum(state, i);
        const int64_t head =
            int64_t(work.batch) * work.kv_heads * work.group_heads + work.first_head + row + 8 * i;  // of all batches
        if (work.lane % 4 == 0 && row + 8 * i < work.heads)
          lse_gmem[head * work.seqlen_q + work.query] = log_sum(state.shift[i], sum);
      }
    }
    if (work.lane % 4 == 0) inverses[row] = inverse[0], inverses[row + 8] = inverse[1];
    named_barrier_arrive<CONSUMERS>(ROWS_DONE);
  } else {
    const float sum[2] = {row_sum(state, 0), row_sum(state, 1)};
    float2* rows_gmem = state_gmem + work.result() * 64 + row;
    if (work.lane % 4 == 0)
      rows_gmem[0] = make_float2(state.shift[0], sum[0]), rows_gmem[8] = make_float2(state.shift[1], sum[1]);
  }
  if constexpr (!SCORES_ALONE) {
    wgmma_wait<0>();
    pin_registers(o);
  }
