  // first_copies.cuh, a part of the kernel's body: Q, the first K and, with two stages, the first V.
  // ---- prologue: Q, the first K and, with two stages, the first V
  float q_frag[ROWS_PER_THREAD][Q_FLOATS_KEPT];
  if (kv_tiles > 0) {
    if constexpr (Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < ROWS_PER_THREAD; i++) {
        const int row = group + i * ROW_GROUPS;
#pragma unroll
        for (int chunk = 0; chunk < QK_CHUNKS; chunk++) {
          Vector<Element, VECTOR_WIDTH> x = {};
          if (row < q_rows) x = load_vector<VECTOR_WIDTH>(q_gmem + row * q_row_stride + chunk * VECTOR_WIDTH);
          to_floats(x, q_frag[i], chunk * VECTOR_WIDTH);
        }
      }
    } else {
      copy_rows<BLOCK_M, HEAD_DIM, ROW_STRIDE, VECTOR_WIDTH, THREADS>(q_smem, q_gmem, q_row_stride, q_rows);
    }
    copy_k(0, 0);
    if constexpr (KV_STAGES == 2) copy_v(0, 0);
    if constexpr (COPIES_ARE_ASYNC) cp_async_commit();
  }
