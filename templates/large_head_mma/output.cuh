  // output.cuh, a part of the kernel's body: O / sums, to global memory. A row that saw no key has sum 0 and
  // the output 0.
  float sum[ROW_TILES][2];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) sum[m][0] = state.sum[m][0], sum[m][1] = state.sum[m][2];
  combine_rows<COLUMN_WARPS, BLOCK_M>(sum, rows_smem, row_warp, column_warp, lane,
                                      [](float a, float b) { return a + b; });
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = sum[m][half] > 0.f ? 1.f / sum[m][half] : 0.f;
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      if (block_row + row >= seqlen_q) continue;
#pragma unroll
      for (int n = 0; n < 2 * DIM_BLOCKS; ++n) {
        const int column = (n / 2 * COLUMN_WARPS + column_warp) * 16 + n % 2 * 8;
        if (V_CHUNKS * 8 != DV_SLICE && column >= DV_SLICE) continue;
        *reinterpret_cast<uint32_t*>(o_gmem + row * o_row_stride + column + lane % 4 * 2) =
            pack2<Element>(state.o[m][n][2 * half] * inverse, state.o[m][n][2 * half + 1] * inverse);
      }
    }
