  // finish.cuh, a part of the kernel's body: sums of dQ, and of dK and dV where blocks share them, to 16 bits.
  const int head = blockIdx.y, batch = blockIdx.z;
  int slot = blockIdx.x;
  Terms terms{VARIANT_ARGUMENTS};
  const PackedSequences packed{terms.given.query_starts, terms.given.key_starts, terms.given.sequences, seqlen_q,
                               seqlen_k};
  if (slot < query_tiles) {
    const float* tile_sums =
        sums_gmem + tile_number(batch, heads, head, query_tiles, slot) * int64_t(BLOCK_M * 16 * DIM_STEPS);
    int tile = slot;
    dq_gmem += batch * dq_batch_stride + head * dq_head_stride;
    if constexpr (VARLEN) {
      const int number = packed.at_slot<BLOCK_M>(slot);
      const Sequence sequence = packed.at(number);
      tile -= packed.first_slot<BLOCK_M>(number);
      seqlen_q = sequence.queries, dq_gmem += sequence.first_query * dq_row_stride;
    }
    store_sums<VECTORS_ADDED, BLOCK_M, 2 * DIM_STEPS, DIM_TILES, ROW_THREADS>(
        tile_sums, softmax_scale, dq_gmem + tile * BLOCK_M * dq_row_stride, dq_row_stride, seqlen_q - tile * BLOCK_M);
  } else if (QUERIES_SPLIT && head < kv_heads) {
    slot -= query_tiles;
    const int64_t number = tile_number(batch, kv_heads, head, key_tiles, slot) * BLOCK_N;
    int tile = slot;
    dk_gmem += batch * dk_batch_stride + head * dk_head_stride;
    dv_gmem += batch * dv_batch_stride + head * dv_head_stride;
    if constexpr (VARLEN) {
      const PackedSequences by_keys{terms.given.key_starts, terms.given.query_starts, terms.given.sequences, seqlen_k,
                                    seqlen_q};
      const int which = by_keys.at_slot<BLOCK_N>(slot);
      const Sequence sequence = packed.at(which);
      tile -= by_keys.first_slot<BLOCK_N>(which);
      seqlen_k = sequence.keys;
      dk_gmem += sequence.first_key * dk_row_stride, dv_gmem += sequence.first_key * dv_row_stride;
    }
    const int first_key = tile * BLOCK_N;
    store_sums<VECTORS_ADDED, BLOCK_N, 2 * DIM_STEPS, DIM_TILES, ROW_THREADS>(
        sums_gmem + dk_begin + number * (16 * DIM_STEPS), softmax_scale, dk_gmem + first_key * dk_row_stride,
        dk_row_stride, seqlen_k - first_key);
    store_sums<VECTORS_ADDED, BLOCK_N, 2 * VALUE_STEPS, VALUE_TILES, ROW_THREADS>(
        sums_gmem + dv_begin + number * (16 * VALUE_STEPS), 1.f, dv_gmem + first_key * dv_row_stride, dv_row_stride,
        seqlen_k - first_key);
  }
