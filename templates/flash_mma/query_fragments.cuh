  // query_fragments.cuh, a part of the kernel's body: Q as mma's A operand, and where a lane reads Q, K and V.
  // Lane addresses for ldmatrix in this warp's rows of Q, and in its keys of stage 0 of the rings.
  const uint32_t q_smem = smem_address + row_warp * WARP_ROWS * Layout::ROW_BYTES + Layout::rows_first(lane);
  const uint32_t k_ring_smem =
      smem_address + K_OFFSET + key_warp * WARP_KEYS * KeyLayout::ROW_BYTES + KeyLayout::chunks_first(lane);
  const uint32_t v_ring_smem =
      smem_address + V_OFFSET + key_warp * WARP_KEYS * ValueLayout::ROW_BYTES + ValueLayout::rows_first(lane);
  // mma's A operand: rows g, g + 8 of dims 0-7, then of dims 8-15 of each step.
  uint32_t q_frag[ROW_TILES][Q_STEPS_KEPT][4];
  float unit[ROW_TILES][2];  // EIGHT_BITS: of the scores of rows g and g + 8
  if constexpr (ALL_EIGHT) {
    const ScaleSource scale{QUERY_SCALE_ARGUMENTS};
    const float of_head = __ldg(scale.gmem + sequence_number * scale.batch + kv_head * scale.head);
    load_eight_bits(q_frag, q_gmem + (warp_row + lane / 4) * q_row_stride + lane % 4 * 4, q_row_stride,
                    seqlen_q - warp_row - lane / 4);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) unit[m][0] = unit[m][1] = of_head;
  } else if constexpr (EIGHT_BITS) {
    load_queries(q_frag, unit, q_gmem + (warp_row + lane / 4) * q_row_stride + lane % 4 * 4, q_row_stride,
                 seqlen_q - warp_row - lane / 4);
  } else if constexpr (Q_PLACE == QPlace::DIRECT) {
    const QueryElement* lane_gmem = q_gmem + (warp_row + lane / 4) * q_row_stride + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int d = 0; d < DIM_STEPS; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = m * 16 + i % 2 * 8, chunk = 2 * d + i / 2;
          const bool valid = chunk < DIM_TILES && warp_row + lane / 4 + row < seqlen_q;
          q_frag[m][d][i] = valid ? *reinterpret_cast<const uint32_t*>(lane_gmem + row * q_row_stride + chunk * 8) : 0;
        }
  } else if constexpr (Q_PLACE == QPlace::REGISTERS) {
    cp_async_wait<NEWER_THAN_K>();
    __syncthreads();  // Q is visible to all warps
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int d = 0; d < DIM_STEPS; ++d) ldmatrix_x4(q_frag[m][d], Layout::block_address(q_smem, m, d));
  }
