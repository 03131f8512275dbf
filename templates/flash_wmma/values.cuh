  // values.cuh, a part of the kernel's body: O = O · factor + P V of a tile of keys.
  const unsigned char* v_smem = smem + V_OFFSET + tile % STAGES * KV_TILE_BYTES;
  if constexpr (O_IN_SHARED) {
    for (int d = column_warp; d < DIM_TILES; d += COLUMN_WARPS) {
      typename Matrix::C o[ROW_TILES];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) Matrix::load(o[m], o_smem + m * 16 * O_ROW_BYTES + d * 64, O_ROW_BYTES);
#pragma unroll
      for (int k = 0; k < KEY_TILES; ++k) {
        typename Matrix::B v_frag;
        Matrix::load(v_frag, v_smem + k * 16 * ROW_BYTES + d * 32, ROW_BYTES);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          typename Matrix::A p_frag;
          Matrix::load(p_frag, s_smem + m * 16 * S_ROW_BYTES + k * 32, S_ROW_BYTES);
          Matrix::multiply(o[m], p_frag, v_frag);
        }
      }
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) Matrix::store(o_smem + m * 16 * O_ROW_BYTES + d * 64, O_ROW_BYTES, o[m]);
    }
    if constexpr (COLUMN_WARPS == 1) __syncwarp();  // the next softmax rescales O
  } else {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float factor = rows_smem[first_row + m * 16 + row_of[e]];
#pragma unroll
        for (int i = 0; i < DIM_TILES_KEPT; ++i) o_frag[m][i].x[e] *= factor;
      }
#pragma unroll
    for (int k = 0; k < KEY_TILES; ++k) {
      typename Matrix::A p_frag[ROW_TILES];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) Matrix::load(p_frag[m], s_smem + m * 16 * S_ROW_BYTES + k * 32, S_ROW_BYTES);
#pragma unroll
      for (int i = 0; i < DIM_TILES_KEPT; ++i) {
        const int d = column_warp + i * COLUMN_WARPS;
        if (DIM_TILES % COLUMN_WARPS != 0 && d >= DIM_TILES) break;  // the last round has not a tile for every warp
        typename Matrix::B v_frag;
        Matrix::load(v_frag, v_smem + k * 16 * ROW_BYTES + d * 32, ROW_BYTES);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) Matrix::multiply(o_frag[m][i], p_frag[m], v_frag);
      }
    }
  }
