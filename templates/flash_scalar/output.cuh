  // output.cuh, a part of the kernel's body: O / l of the thread's rows.
  // ---- O / l; a row that saw no key has l = 0 and the output 0
#pragma unroll
  for (int i = 0; i < ROWS_PER_THREAD; i++) {
#pragma unroll
    for (int lanes = THREADS_PER_ROW / 2; lanes > 0; lanes /= 2)
      row_sum[i] += __shfl_xor_sync(ALL_LANES, row_sum[i], lanes);
    const float inverse = row_sum[i] == 0.f ? 0.f : 1.f / row_sum[i];
    const int row = group + i * ROW_GROUPS;
    if (row >= q_rows) continue;
#pragma unroll
    for (int c = 0; c < CHUNKS_PER_THREAD; c++) {
      if (group_lane + c * THREADS_PER_ROW >= VALUE_CHUNKS) continue;
      float chunk[VALUE_WIDTH];
#pragma unroll
      for (int e = 0; e < VALUE_WIDTH; e++) chunk[e] = output[i][c * VALUE_WIDTH + e] * inverse;
      store_floats(o_gmem + row * o_row_stride + column[c], chunk);
    }
  }
