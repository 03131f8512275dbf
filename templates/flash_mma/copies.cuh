  // copies.cuh, a part of the kernel's body: how Q and tiles of K and V come into shared memory.
  // cp.async groups, in this order whatever exists: Q and K[0], V[0], K[1], V[1], … Tiles past the last leave empty
  // groups, which keep the count.
  const KvElement* k_next_gmem = CopyK::thread_source(k_gmem, k_row_stride);
  const KvElement* v_next_gmem = CopyV::thread_source(v_gmem, v_row_stride);
  const KeyPages pages{terms.given.table + sequence_number * int64_t(terms.given.table_pages), terms.given.page_bits,
                       terms.given.kv_rows, seqlen_k};
  // A tile of K or V; `next_gmem` is where this thread's part of it begins, and then that of the next; of a list that
  // of key 0.
  auto copy_tile = [&](auto copy, int tile, uint32_t place_smem, const KvElement* gmem, int64_t batch_stride,
                       int64_t row_stride, const KvElement*& next_gmem) {
    if constexpr (PAGED) {
      copy.copy_pages(place_smem, gmem, batch_stride, row_stride, pages, first_block_key + tile * BLOCK_N);
    } else if constexpr (KeyList::LISTED) {
      const int key = key_tiles.first_key(tile);
      copy.copy(place_smem, next_gmem + key * row_stride, row_stride, seqlen_k - key);
    } else {
      copy.copy(place_smem, next_gmem, row_stride, seqlen_k - first_block_key - tile * BLOCK_N);
      next_gmem += BLOCK_N * row_stride;
    }
  };
  auto load_k = [&](int tile) {
    if (tile < tiles) {
      copy_tile(CopyK{}, tile, smem_address + K_OFFSET + tile % K_STAGES * K_TILE_BYTES, k_gmem, k_batch_stride,
                k_row_stride, k_next_gmem);
    }
    cp_async_commit();
  };
  auto load_v = [&](int tile) {
    if (tile >= 0 && tile < tiles) {
      copy_tile(CopyV{}, tile, smem_address + V_OFFSET + tile % V_STAGES * V_TILE_BYTES, v_gmem, v_batch_stride,
                v_row_stride, v_next_gmem);
    }
    cp_async_commit();
  };
  if (Q_PLACE != QPlace::DIRECT && tiles > 0) {
    CopyQ::copy(smem_address, CopyQ::thread_source(q_gmem + block_row * q_row_stride, q_row_stride), q_row_stride,
                seqlen_q - block_row);
  }
  constexpr bool K_FIRST = SCHEDULE == Schedule::TOGETHER;   // the first group begun in the loop is one of K, else of V
  constexpr int K_LEAD = K_FIRST ? K_STAGES - 1 : K_STAGES;  // tiles of K under way when the loop begins
#pragma unroll
  for (int i = 0; i < K_LEAD; ++i) {
    load_k(i);
    if (K_FIRST || i < K_LEAD - 1) load_v(i - (K_STAGES - V_STAGES));
  }
  // Groups begun after K[tile] when it is needed first.
  constexpr int NEWER_THAN_K = 2 * (K_LEAD - 1) + (K_FIRST ? 1 : 0);
  // Zeros for the upper half of the last k-step of Q and K: no copy writes there, so once is enough.
  if constexpr (!EIGHT_BITS && DIM_TILES % 2 != 0) {
    for (int row = threadIdx.x; row < Q_BYTES / Layout::ROW_BYTES; row += THREADS) {
      *reinterpret_cast<uint4*>(smem + Layout::offset(row, DIM_TILES)) = make_uint4(0, 0, 0, 0);
    }
    for (int row = threadIdx.x; row < K_STAGES * BLOCK_N; row += THREADS) {
      *reinterpret_cast<uint4*>(smem + K_OFFSET + Layout::offset(row, DIM_TILES)) = make_uint4(0, 0, 0, 0);
    }
  }
