// products.cuh: Q Kᵀ and P V of a tile for the rows of one thread. Needs the constants of flash_scalar.cu.j2.

// S[i][j] = Σ_d Q[row i][d] · K[key j][d] for this thread's rows and its keys group_lane + j · THREADS_PER_ROW.
// A long fp32 sum is taken in segments: added one by one, 128 products of large logits are as wrong as fp32 attention
// may be altogether.
__device__ __forceinline__ void multiply_qk(
    float (&score)[ROWS_PER_THREAD][KEYS_PER_THREAD],
    float (&q_frag)[ROWS_PER_THREAD][Q_FLOATS_KEPT],  // whole rows if Q_IN_REGISTERS, else scratch
    const Element* q_smem,                            // [BLOCK_M, HEAD_DIM] from the thread's first row
    const Element* k_smem) {                          // [BLOCK_N, HEAD_DIM] from the thread's first key
  constexpr bool SEGMENTED = SEGMENT < HEAD_DIM;
  float partial[ROWS_PER_THREAD][KEYS_PER_THREAD];
  float(&sum)[ROWS_PER_THREAD][KEYS_PER_THREAD] = SEGMENTED ? partial : score;
#pragma unroll
  for (int i = 0; i < ROWS_PER_THREAD; i++)
#pragma unroll
    for (int j = 0; j < KEYS_PER_THREAD; j++) score[i][j] = partial[i][j] = 0.f;
  auto add_partial = [&] {
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++)
#pragma unroll
      for (int j = 0; j < KEYS_PER_THREAD; j++) {
        score[i][j] += partial[i][j];
        partial[i][j] = 0.f;
      }
  };

  // Registers cannot be indexed by a running variable.
  constexpr int CHUNK_UNROLL = Q_IN_REGISTERS ? QK_CHUNKS : UNROLL;
#pragma unroll CHUNK_UNROLL
  for (int chunk = 0; chunk < QK_CHUNKS; chunk++) {
    if constexpr (!Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < ROWS_PER_THREAD; i++)
        to_floats(load_vector<VECTOR_WIDTH>(q_smem + i * ROW_GROUPS * ROW_STRIDE + chunk * VECTOR_WIDTH), q_frag[i]);
    }
    const int first = Q_IN_REGISTERS ? chunk * VECTOR_WIDTH : 0;
#pragma unroll
    for (int j = 0; j < KEYS_PER_THREAD; j++) {
      float k[VECTOR_WIDTH];
      to_floats(load_vector<VECTOR_WIDTH>(k_smem + j * THREADS_PER_ROW * ROW_STRIDE + chunk * VECTOR_WIDTH), k);
#pragma unroll
      for (int e = 0; e < VECTOR_WIDTH; e++)
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) sum[i][j] = fmaf(q_frag[i][first + e], k[e], sum[i][j]);
    }
    if (SEGMENTED && (chunk + 1) % (SEGMENT / VECTOR_WIDTH) == 0) add_partial();
  }
  if constexpr (HEAD_DIM % SEGMENT != 0) add_partial();
}

// O[i][·] += p[i] · V[key][·] for the thread's chunks group_lane + c · THREADS_PER_ROW.
__device__ __forceinline__ void accumulate_value_row(float (&output)[ROWS_PER_THREAD][OUTPUTS_PER_THREAD],
                                                     const float (&p)[ROWS_PER_THREAD],
                                                     const Element* v_row_smem,  // [HEAD_DIM]
                                                     const int (&column)[CHUNKS_PER_THREAD]) {
#pragma unroll
  for (int c = 0; c < CHUNKS_PER_THREAD; c++) {
    float v[VALUE_WIDTH];
    to_floats(load_vector<VALUE_WIDTH>(v_row_smem + column[c]), v);
#pragma unroll
    for (int e = 0; e < VALUE_WIDTH; e++)
#pragma unroll
      for (int i = 0; i < ROWS_PER_THREAD; i++)
        output[i][c * VALUE_WIDTH + e] = fmaf(p[i], v[e], output[i][c * VALUE_WIDTH + e]);
  }
}

// O += P V over one tile. P comes from p_smem, or from `score` of the thread that holds it.
__device__ __forceinline__ void multiply_pv(float (&output)[ROWS_PER_THREAD][OUTPUTS_PER_THREAD],
                                            const float (&score)[ROWS_PER_THREAD][KEYS_PER_THREAD],
                                            const Fp32* p_smem,     // [BLOCK_M, BLOCK_N] from the thread's first row
                                            const Element* v_smem,  // [BLOCK_N, HEAD_DIM]
                                            const int (&column)[CHUNKS_PER_THREAD]) {
  if constexpr (P_IN_SHARED) {
#pragma unroll UNROLL
    for (int key = 0; key < BLOCK_N; key += P_WIDTH) {
      float p[ROWS_PER_THREAD][P_WIDTH];
#pragma unroll
      for (int i = 0; i < ROWS_PER_THREAD; i++)
        to_floats(load_vector<P_WIDTH>(p_smem + i * ROW_GROUPS * P_STRIDE + key), p[i]);
#pragma unroll
      for (int k = 0; k < P_WIDTH; k++) {
        float p_of_key[ROWS_PER_THREAD];
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) p_of_key[i] = p[i][k];
        accumulate_value_row(output, p_of_key, v_smem + (key + k) * ROW_STRIDE, column);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < KEYS_PER_THREAD; j++) {
#pragma unroll UNROLL
      for (int holder = 0; holder < THREADS_PER_ROW; holder++) {
        float p_of_key[ROWS_PER_THREAD];
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++)
          p_of_key[i] = __shfl_sync(ALL_LANES, score[i][j], holder, THREADS_PER_ROW);
        accumulate_value_row(output, p_of_key, v_smem + (j * THREADS_PER_ROW + holder) * ROW_STRIDE, column);
      }
    }
  }
}
