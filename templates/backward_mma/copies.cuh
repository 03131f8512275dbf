  // copies.cuh, a part of the kernel's body: how K, V and tiles of Q, dO and their rows' terms come into shared memory.
  // A cp.async group for each tile, the first with K and V; past the last tile they are empty, which keeps the count.
  if constexpr (K_SHARED) {
    CopyK::copy(smem_address, CopyK::thread_source(k_gmem, k_row_stride), k_row_stride, end_key - first_key);
  }
  if constexpr (V_SHARED) {
    CopyV::copy(smem_address + V_OFFSET, CopyV::thread_source(v_gmem, v_row_stride), v_row_stride, end_key - first_key);
  }
  int copied = begin, copied_stage = 0;
  int copied_head = kv_head * group, copied_tile = first_tile;
  if (QUERIES_SPLIT && begin > 0) copied_head += begin / head_tiles, copied_tile += begin % head_tiles;
  if (BlockStates::LISTED && end > 0) states.find<BLOCK_M>(batch, copied_head, copied_tile, list_block, lane);
  auto copy_next = [&]() {
    if (copied < end) {
      const int query = copied_tile * BLOCK_M;
      const Element* q_tile = q_gmem + copied_head * q_head_stride + query * q_row_stride;
      const Element* do_tile = do_gmem + copied_head * do_head_stride + query * do_row_stride;
      CopyQ::copy(smem_address + Q_OFFSET + copied_stage * Q_TILE_BYTES, CopyQ::thread_source(q_tile, q_row_stride),
                  q_row_stride, seqlen_q - query);
      CopyDo::copy(smem_address + DO_OFFSET + copied_stage * DO_TILE_BYTES,
                   CopyDo::thread_source(do_tile, do_row_stride), do_row_stride, seqlen_q - query);
      const float* terms_gmem =
          rows_gmem +
          tile_number(batch, heads, copied_head, query_tiles, first_query_slot + copied_tile) * (2 * BLOCK_M);
      for (int i = threadIdx.x; i < BLOCK_M / 2; i += THREADS) {
        cp_async<16>(smem_address + ROWS_OFFSET + copied_stage * 8 * BLOCK_M + 16 * i, terms_gmem + 4 * i, 16);
      }
      ++copied, ++copied_tile;
      if (copied_tile == first_tile + head_tiles) ++copied_head, copied_tile = first_tile;
      if (BlockStates::LISTED && copied < end) {
        states.find<BLOCK_M>(batch, copied_head, copied_tile, list_block, lane);
      }
      copied_stage = copied_stage + 1 == STAGES ? 0 : copied_stage + 1;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < (STAGES > 1 ? STAGES - 1 : 1); ++i) copy_next();
  // Zeros for the upper half of the last k-step: no copy writes there, so once is enough.
  auto zero_chunk = [&](auto layout, int offset, int rows, int chunk) {
    for (int row = threadIdx.x; row < rows; row += THREADS) {
      *reinterpret_cast<uint4*>(smem + offset + layout.offset(row, chunk)) = make_uint4(0, 0, 0, 0);
    }
  };
  if constexpr (DIM_TILES % 2 != 0) {
    if constexpr (K_SHARED) zero_chunk(Layout{}, 0, BLOCK_N, DIM_TILES);
    zero_chunk(Layout{}, Q_OFFSET, STAGES * BLOCK_M, DIM_TILES);
  }
  if constexpr (VALUE_TILES % 2 != 0) {
    if constexpr (V_SHARED) zero_chunk(ValueLayout{}, V_OFFSET, BLOCK_N, VALUE_TILES);
    zero_chunk(ValueLayout{}, DO_OFFSET, STAGES * BLOCK_M, VALUE_TILES);
  }
