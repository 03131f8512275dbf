  // producer.cuh, a part of the kernel's body: the thread that brings Q and tiles of K into shared memory.
  Tiles::load<64>(smem_address, q_map, smem_address + Q_FULL, first_head, query, batch);
  const TileRing<Tiles, BLOCK_N, STAGES> k_ring{k_map, k_smem, smem_address + K_FULL, smem_address + K_EMPTY};
  const KeyPages pages{terms.given.table + batch * int64_t(terms.given.table_pages), terms.given.page_bits,
                       terms.given.kv_rows, seqlen_k};
  const int first_key = batch * terms.given.kv_rows;
  Ring ring;
  for (int tile = last_tile; tile >= first_tile; --tile) {
    k_ring.load_keys<PAGED, SEQUSED>(ring, tile * BLOCK_N, pages, first_key + seqlen_k, kv_head, batch);
    ring.advance();
  }
