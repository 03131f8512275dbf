  // softmax.cuh, a part of the kernel's body: the mask and the online softmax of a tile, and P for all threads of a
  // row.
  // ---- S = -inf where the mask hides the key; only a boundary tile has such keys
  if ((tile + 1) * BLOCK_N > keys_unmasked) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++) {
      const int row = q_start + group + i * ROW_GROUPS;
      const int row_keys_end = mask.keys_of(row);
#pragma unroll
      for (int j = 0; j < KEYS_PER_THREAD; j++)
        if (tile * BLOCK_N + group_lane + j * THREADS_PER_ROW >= row_keys_end) score[i][j] = NEGATIVE_INFINITY;
    }
  }

  // ---- online softmax: m' = max(m, max_j S), P = 2^((S - m') scale), l' = l 2^((m - m') scale) + Σ_j P, O' = O
  // 2^((m - m') scale)
#pragma unroll
  for (int i = 0; i < ROWS_PER_THREAD; i++) {
    float new_max = row_max[i];
#pragma unroll
    for (int j = 0; j < KEYS_PER_THREAD; j++) new_max = fmaxf(new_max, score[i][j]);
#pragma unroll
    for (int lanes = THREADS_PER_ROW / 2; lanes > 0; lanes /= 2)
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, lanes));
    // No key seen yet: -inf - 0, not -inf + inf.
    const float finite_max = new_max == NEGATIVE_INFINITY ? 0.f : new_max;
    const float shift = finite_max * softmax_scale_log2;
    // Exactly 1 while the maximum stays.
    const float rescale = exp2_approx((row_max[i] - finite_max) * softmax_scale_log2);
    row_max[i] = new_max;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < KEYS_PER_THREAD; j++) {
      score[i][j] = exp2_approx(fmaf(score[i][j], softmax_scale_log2, -shift));
      sum += score[i][j];
    }
    row_sum[i] = fmaf(row_sum[i], rescale, sum);
#pragma unroll
    for (int c = 0; c < OUTPUTS_PER_THREAD; c++) output[i][c] *= rescale;
  }
  if constexpr (P_IN_SHARED) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++)
#pragma unroll
      for (int j = 0; j < KEYS_PER_THREAD; j++)
        p_smem[(group + i * ROW_GROUPS) * P_STRIDE + group_lane + j * THREADS_PER_ROW].value = score[i][j];
  }

  if constexpr (KV_STAGES == 1) {
    if constexpr (COPIES_ARE_ASYNC) cp_async_wait<0>();
    __syncthreads();  // all threads' copies of V have arrived, the row's P is written, and none still reads this K
    if (tile + 1 < kv_tiles) copy_k(tile + 1, 0);  // arrives behind P V
    if constexpr (COPIES_ARE_ASYNC) cp_async_commit();
  } else if constexpr (P_IN_SHARED) {
    __syncwarp();  // the row's P is written by the threads that share the row, all of this warp
  }
