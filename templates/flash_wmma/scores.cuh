  // scores.cuh, a part of the kernel's body: S = Q Kᵀ of a tile of keys, to shared memory.
  const unsigned char* k_smem = smem + K_OFFSET + tile % STAGES * KV_TILE_BYTES;
  if (Q_IN_FRAGMENTS && tile == 0) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int d = 0; d < (Q_IN_FRAGMENTS ? DIM_TILES : 1); ++d) {
        Matrix::load(q_frag[m][d], q_smem + m * 16 * ROW_BYTES + d * 32, ROW_BYTES);
      }
  }
  for (int n = column_warp; n < KEY_TILES; n += COLUMN_WARPS) {
    typename Matrix::C s_frag[ROW_TILES];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) Matrix::clear(s_frag[m]);
#pragma unroll
    for (int d = 0; d < DIM_TILES; ++d) {
      typename Matrix::TransposedB k_frag;
      Matrix::load(k_frag, k_smem + n * 16 * ROW_BYTES + d * 32, ROW_BYTES);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        typename Matrix::A& q = q_frag[m][Q_IN_FRAGMENTS ? d : 0];
        if constexpr (!Q_IN_FRAGMENTS) Matrix::load(q, q_smem + m * 16 * ROW_BYTES + d * 32, ROW_BYTES);
        Matrix::multiply(s_frag[m], q, k_frag);
      }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) Matrix::store(s_smem + m * 16 * S_ROW_BYTES + n * 64, S_ROW_BYTES, s_frag[m]);
  }
  rows_barrier();  // whole rows of S are written
