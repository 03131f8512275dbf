  // second_half.cuh, a part of the kernel's body: a warpgroup without scores makes its half of O of P in shared memory.
  OtherP p;
  int p_tile = 0;
  for (int tile = work.last_tile; tile >= work.first_tile; --tile) {
    mbarrier_wait(work.k_full(ring), ring.parity);  // visible to this warpgroup too
    named_barrier_sync<CONSUMERS>(P_READY + p_tile);
    if (tile < work.last_tile) {
      const float factor[2] = {factors[p_tile * 64 + row], factors[p_tile * 64 + row + 8]};
      if (__any_sync(ALL_LANES, factor[0] != 1.f || factor[1] != 1.f)) scale_rows(o, factor);
    }
    // Then there is another tile for this place.
    auto free_p = [&] {
      if (tile > work.first_tile + P_TILES - 1) named_barrier_arrive<CONSUMERS>(P_FREE + p_tile);
    };
    p.load(p_tile, p_smem, work.warp % 4, work.lane);
    if constexpr (SCORES_ALONE) free_p();
    multiply_pv(o, p, v_tile(ring));
    wgmma_wait<0>();
    pin_registers(o);
    if constexpr (!SCORES_ALONE) free_p();
    p_tile = (p_tile + 1) % P_TILES;
    release(ring);
    ring.advance();
  }
  if (work.splits == 1) {
    named_barrier_sync<CONSUMERS>(ROWS_DONE);
    inverse[0] = inverses[row], inverse[1] = inverses[row + 8];
  }
