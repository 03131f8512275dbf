  // softmax.cuh, a part of the kernel's body: the online softmax of a tile of keys, one row per warp: m' = max(m, max_j
  // S), P = 2^((S - m') scale), l' = l 2^((m - m') scale) + Σ_j P. Each step is done for all rows of a group, since
  // each waits long for the one before.
#pragma unroll
  for (int first = 0; first < SOFTMAX_ROWS; first += ROWS_AT_ONCE) {
    if (BLOCK_M % WARPS != 0 && warp >= BLOCK_M) break;
    float score[ROWS_AT_ONCE][SOFTMAX_KEYS], new_max[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
      const int row = warp + (first + i) * WARPS;
      // Of this tile, that the row sees.
      const int keys = min(BLOCK_N, block.keys_of(block.first_row + row) - tile * BLOCK_N);
      new_max[i] = row_max[first + i];
#pragma unroll
      for (int j = 0; j < SOFTMAX_KEYS; j++) {
        const int key = lane + 32 * j;
        score[i][j] = key < keys ? scores_smem[row * SCORE_STRIDE + key] : NEGATIVE_INFINITY;
#pragma unroll
        for (int group = 1; group < SUM_GROUPS; group++) {
          if (key < keys) score[i][j] += scores_smem[group * SCORE_TILE + row * SCORE_STRIDE + key];
        }
        new_max[i] = fmaxf(new_max[i], score[i][j]);
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i++)
        new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(ALL_LANES, new_max[i], distance));
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
      const int row = warp + (first + i) * WARPS;
      // No key seen yet: -inf - 0, not -inf + inf.
      const float finite_max = new_max[i] == NEGATIVE_INFINITY ? 0.f : new_max[i];
      // Exactly 1 while it stays.
      const float rescale = exp2_approx((row_max[first + i] - finite_max) * softmax_scale_log2);
      row_max[first + i] = new_max[i];
      row_sum[first + i] *= rescale;
#pragma unroll
      for (int j = 0; j < SOFTMAX_KEYS; j++) {
        const float p = exp2_approx((score[i][j] - finite_max) * softmax_scale_log2);
        row_sum[first + i] += p;
        if (BLOCK_N % 32 == 0 || lane + 32 * j < BLOCK_N) scores_smem[row * SCORE_STRIDE + lane + 32 * j] = p;
      }
      if (lane == 0) factor_smem[row] = rescale;
    }
    if (tile + 1 < tiles) continue;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
      for (int i = first; i < first + ROWS_AT_ONCE; i++) row_sum[i] += __shfl_xor_sync(ALL_LANES, row_sum[i], distance);
#pragma unroll
    for (int i = first; i < first + ROWS_AT_ONCE; i++) {  // a row that sees a key has 1 or more: no denormals
      if (lane == 0) inverse_smem[warp + i * WARPS] = row_sum[i] == 0.f ? 0.f : __fdividef(1.f, row_sum[i]);
    }
  }
