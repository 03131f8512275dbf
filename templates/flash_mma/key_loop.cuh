  // key_loop.cuh, a part of the kernel's body: how a block goes through tiles of keys, by the schedule.
  if constexpr (SCHEDULE == Schedule::OVERLAPPED) {
    Scores s;
    cp_async_wait<NEWER_THAN_K>();
    __syncthreads();  // Q and K[0] are visible to all warps
    if (tiles > 0 && visible(0)) scores(s, 0);
    for (int tile = 0; tile < tiles; ++tile) {
      cp_async_wait<NEWER_THAN_K - 2>();
      __syncthreads();  // V[tile], K[tile + 1] are visible to all warps; none still reads V[tile - 1], K[tile]
      load_v(tile + V_STAGES - 1);
      load_k(tile + K_STAGES);
      if (!visible(tile)) continue;
      exponents(s, tile);
      if (tile + 1 < tiles && visible(tile + 1)) {
        Scores next;
        scores(next, tile + 1);
        accumulate(s, tile);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
          for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = next[m][n][e];
      } else {
        accumulate(s, tile);
      }
    }
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      Scores s;
      if (SCHEDULE == Schedule::TOGETHER && tile > 0) cp_async_wait<NEWER_THAN_K - 1>();
      else cp_async_wait<NEWER_THAN_K>();
      __syncthreads();  // K[tile] (TOGETHER: V[tile > 0] too) is visible to all warps; none still reads tile - 1
      if constexpr (SCHEDULE == Schedule::TOGETHER) load_k(tile + K_STAGES - 1);
      load_v(tile + V_STAGES - 1);
      if (visible(tile)) scores(s, tile);
      if (SCHEDULE == Schedule::SPLIT || tile == 0) {
        cp_async_wait<2 * (V_STAGES - 1)>();
        __syncthreads();  // V[tile] is visible to all warps, and (SPLIT) none still reads K[tile]
        if constexpr (SCHEDULE == Schedule::SPLIT) load_k(tile + K_STAGES);
      }
      if (!visible(tile)) continue;
      exponents(s, tile);
      accumulate(s, tile);
    }
  }
