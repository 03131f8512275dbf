  // second_half.cuh, a part of the kernel's body: the second warpgroup makes its half of O of P in shared memory.
  SharedP p;
  p.tile.load(p_smem, warp, lane);
  for (int tile = last_tile; tile >= first_tile; --tile) {
    mbarrier_wait(k_full(ring), ring.parity);  // visible to this warpgroup too
    named_barrier_sync<CONSUMERS>(P_READY);
    if (tile < last_tile) {
      const float factor[2] = {factors[row], factors[row + 8]};
      if (__any_sync(ALL_LANES, factor[0] != 1.f || factor[1] != 1.f)) scale_rows(o, factor);
    }
    multiply_pv(o, p, v_tile(ring));
    wgmma_wait<0>();
    pin_registers(o);
    if (tile > first_tile) named_barrier_arrive<CONSUMERS>(P_FREE);
    release(ring);
    ring.advance();
  }
  if (splits == 1) {
    named_barrier_sync<CONSUMERS>(ROWS_DONE);
    inverse[0] = inverses[row], inverse[1] = inverses[row + 8];
  }
