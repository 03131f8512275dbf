  // output.cuh, a part of the kernel's body: the results of the warps, then of the splits, are added up and stored.
  const Buffer buffer{smem};
  work.put(buffer, warp, key_scales.v_factor);
  __syncthreads();  // the results of all warps are visible
  auto write_log_sum = [&](int row, const RowShare& share) {
    const int head = first_head + packed.head(first_row + row);
    store_log_sum(LSE_ARGUMENTS, share, terms, head, int64_t(batch) * heads + head, seqlen_q, sequence.first_query,
                  packed.query(first_row + row));
  };
  if constexpr (MERGE == Merge::CLUSTER) {
    cluster_wait();  // all blocks of the cluster have begun and may be sent to
    for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
      Exchange::send(shared_address(smem + EXCHANGE_OFFSET), split, i, buffer.total(WARPS, i / CHUNKS, i % CHUNKS));
    }
    Exchange::exchange();
    for (int slot = threadIdx.x; slot < Exchange::SLOTS; slot += THREADS) {
      const int item = Exchange::item(split, slot), row = item / CHUNKS;
      if (row >= rows) continue;
      store_share(o_gmem + packed.offset(first_row + row, o_head_stride, o_row_stride) + item % CHUNKS * 4,
                  Exchange::total(smem + EXCHANGE_OFFSET, slot), terms, first_head + packed.head(first_row + row));
      if constexpr (WRITE_LSE)
        if (item % CHUNKS == 0) write_log_sum(row, Exchange::total(smem + EXCHANGE_OFFSET, slot));
    }
    return;
  }
  const int64_t tile = (int64_t(index) * (KeyList::LISTED ? gridDim.y : kv_heads) + kv_head) * row_blocks + row_block;
  const int64_t split_row = (tile * splits + split) * BLOCK_M;
  for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const RowShare share = buffer.total(WARPS, row, chunk);
    if (live_splits == 1) {
      store_share(o_gmem + packed.offset(first_row + row, o_head_stride, o_row_stride) + chunk * 4, share, terms,
                  first_head + packed.head(first_row + row));
      if constexpr (WRITE_LSE)
        if (chunk == 0) write_log_sum(row, share);
    } else {
      partial_gmem[(split_row + row) * CHUNKS + chunk] = share.o;
      if (chunk == 0) state_gmem[split_row + row] = make_float2(share.shift, share.sum);
    }
  }

  if constexpr (MERGE == Merge::LAST_BLOCK) {
    if (live_splits == 1 ||
        !is_last_block(arrived_zeroed + tile, live_splits, reinterpret_cast<uint32_t*>(smem + TICKET_OFFSET)))
      return;
    const int64_t tile_row = tile * splits * BLOCK_M;
    const int sources = gather_splits<THREADS>(buffer, partial_gmem + tile_row * CHUNKS, state_gmem + tile_row,
                                               live_splits, BLOCK_M, rows);
    __syncthreads();  // the sums of all threads are visible
    for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      store_share(o_gmem + packed.offset(first_row + row, o_head_stride, o_row_stride) + chunk * 4,
                  buffer.total(sources, row, chunk), terms, first_head + packed.head(first_row + row));
      if constexpr (WRITE_LSE)
        if (chunk == 0) write_log_sum(row, buffer.total(sources, row, chunk));
    }
  }
