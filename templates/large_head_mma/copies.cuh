  // copies.cuh, a part of the kernel's body: how chunks of Q, K and V come into shared memory, and the wait for one.
  const Element* q_thread_gmem = CopyQ::thread_source(q_gmem, q_row_stride);
  const Element* k_thread_gmem = CopyK::thread_source(k_gmem, k_row_stride);
  const Element* v_thread_gmem = CopyV::thread_source(v_gmem, v_row_stride);
  int copy_tile = 0, copy_step = 0, copy_stage = 0;
  // Begins the copy of the next chunk, one cp.async group: of every tile first all chunks of K, then all of V. Past the
  // last the group is empty, which keeps the count. Q comes with the chunks of the first tile.
  auto copy_chunk = [&]() {
    if (copy_tile < tiles) {
      const uint32_t stage_smem = smem_address + copy_stage * STAGE_BYTES;
      const int keys = seqlen_k - copy_tile * BLOCK_N;  // from this tile on
      if (copy_step < K_STEPS) {
        const int column = copy_step * DIM_CHUNK, chunks = (QK_COLUMNS - column) / 8;
        CopyK::copy(stage_smem, k_thread_gmem + column, k_row_stride, keys, chunks);
        if (Q_STREAMED || copy_tile == 0) {
          const uint32_t q_smem =
              Q_STREAMED ? stage_smem + K_CHUNK_BYTES : smem_address + Q_OFFSET + copy_step * Q_CHUNK_BYTES;
          CopyQ::copy(q_smem, q_thread_gmem + column, q_row_stride, seqlen_q - block_row, chunks);
        }
      } else {
        CopyV::copy(stage_smem, v_thread_gmem, v_row_stride, keys - (copy_step - K_STEPS) * KEY_CHUNK, DV_SLICE / 8);
        v_thread_gmem += KEY_CHUNK * v_row_stride;
      }
      if (++copy_step == K_STEPS + V_STEPS) {
        copy_step = 0, ++copy_tile;
        k_thread_gmem += BLOCK_N * k_row_stride;
      }
      if (++copy_stage == STAGES) copy_stage = 0;
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) copy_chunk();
  int stage = 0;
  auto next_chunk = [&]() {  // returns where it lies
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this chunk is visible to all warps; none still reads the one before
    copy_chunk();     // in place of the one before
    const uint32_t chunk_smem = smem_address + stage * STAGE_BYTES;
    if (++stage == STAGES) stage = 0;
    return chunk_smem;
  };
