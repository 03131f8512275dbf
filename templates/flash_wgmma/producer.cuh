  // producer.cuh, a part of the kernel's body: the warps that bring tiles of Q, K and V into shared memory. One thread
  // issues every copy; of pages, which may be many small ones, each warp of a warpgroup a part, if all know the tiles.
  constexpr int PARTS = PAGED && SCHEDULE != Schedule::CLAIMED ? PRODUCER_WARPS : 1;
  const int part = PARTS == 1 ? 0 : warp - 4 * WARPGROUPS;
  if (warp == 4 * WARPGROUPS && lane == 0) {
    prefetch_tensor_map(q_map), prefetch_tensor_map(k_map), prefetch_tensor_map(v_map);
    Smem::init_barriers<PARTS>(smem_address);
  }
  __syncwarp();
  // Others see the initialised barriers; who initialised them need not wait.
  if (PARTS > 1 && part > 0) named_barrier_sync<THREADS>(BARRIERS_READY);
  else named_barrier_arrive<THREADS>(BARRIERS_READY);
  if constexpr (CLUSTER > 1) cluster_arrive();  // other blocks see them too
  if constexpr (PRODUCER_REGISTERS > 0) decrease_registers<PRODUCER_REGISTERS>();
  if ((PARTS > 1 || warp == 4 * WARPGROUPS) && lane == 0) {
    const TileRing<Tiles, BLOCK_N, STAGES> k_ring{k_map, k_smem, barrier(Smem::K_FULL, 0), barrier(Smem::K_EMPTY, 0)};
    const TileRing<ValueTiles, BLOCK_N, STAGES> v_ring{v_map, v_smem, barrier(Smem::V_FULL, 0),
                                                       barrier(Smem::V_EMPTY, 0)};
    Ring ring;  // of both: each tile of K goes before its V
    int index = blockIdx.x;
    KeyShare share;
    // Every tile makes one claim, so that the counter wraps to 0 with the launch's last.
    auto next_index = [&](int turn) {
      return SCHEDULE == Schedule::CLAIMED ? blocks_read_again() + int(atomicInc(counters_zeroed, tiles - 1))
                                           : fixed_tile<Mask::ROWS_DIFFER>(turn);
    };
    int turn = 0;  // VARLEN: rounds and slots without a tile
    for (int round = 0;; ++round) {
      if constexpr (VARLEN && PERSISTENT) {
        for (; index < tiles; index = next_index(++turn)) {
          tile = tile_at<HEADS_IN_TURN, Mask::LAST_FIRST>(index, row_blocks, heads, batches);
          if (enter_slot(tile)) break;
        }
      }
      if constexpr (SCHEDULE == Schedule::BALANCED) index = share.next(round, tiles, key_tiles) ? share.index : tiles;
      // Consumers read the tile once their Q is full. Its place is that of the round before the last, in which all of
      // them released Q.
      const uint32_t tile_smem = smem_address + Smem::TILE + Smem::TILE_BYTES * (round % 2);
      auto wait_for_q_place = [&](int i) {  // a warpgroup has read its last Q
        if constexpr (PERSISTENT) mbarrier_wait(barrier(Smem::Q_EMPTY, i), round % 2 ^ 1);
      };
      auto tell = [&](int offset, int word) {
        if (part == 0) write_shared_word(tile_smem + offset, word);
      };
      if (PERSISTENT && index >= tiles) {  // none is left
        tell(0, -1);
        for (int i = 0; i < WARPGROUPS && part == 0; ++i) {
          wait_for_q_place(i), mbarrier_arrive(barrier(Smem::Q_FULL, i));
        }
        break;
      }
      if constexpr (PERSISTENT) {
        if constexpr (!VARLEN) tile = tile_at<HEADS_IN_TURN, Mask::LAST_FIRST>(index, row_blocks, rows.heads, batch);
        tell(0, tile.row_block), tell(4, tile.head), tell(8, tile.batch);
        if (SCHEDULE == Schedule::BALANCED) tell(12, share.range.word);
        if constexpr (VARLEN) tell(16, sequence.first_query), tell(20, sequence.queries);
        if constexpr (SEQUSED) enter_batch(tile.batch);
        if constexpr (SLIDING) tell(24, sequence.keys);
      }
      for (int i = 0; i < WARPGROUPS && part == 0; ++i) {
        wait_for_q_place(i);
        const int row = tile.row_block * BLOCK_M + i * 64;
        const uint32_t place = smem_address + i * Smem::Q_PLACE_BYTES, full = barrier(Smem::Q_FULL, i);
        if constexpr (VARLEN) {
          Tiles::load_sliding<64>(place, q_map, full, row, sequence.queries, sequence.end_query(), tile.head);
        } else {
          rows.load<Tiles>(place, q_map, full, row, tile);
        }
      }
      // Most need not wait for a division.
      const int kv_head = GROUP_ROWS || heads == kv_heads ? tile.head : tile.head / (heads / kv_heads);
      const int last = SCHEDULE == Schedule::BALANCED ? share.range.last() : last_key_tile(tile.row_block);
      const int first = SCHEDULE == Schedule::BALANCED ? share.range.first()
                        : Mask::WINDOW                 ? first_key_tile(tile.row_block)
                                                       : 0;
      const KeyPages pages{terms.given.table + tile.batch * int64_t(terms.given.table_pages), terms.given.page_bits,
                           terms.given.kv_rows, seqlen_k};
      for (int key_tile = last; key_tile >= first; key_tile -= KEY_SPLIT) {
        if constexpr (PAGED) {
          k_ring.load_paged<PARTS>(ring, pages, key_tile * BLOCK_N, kv_head, part);
          v_ring.load_paged<PARTS>(ring, pages, key_tile * BLOCK_N, kv_head, part);
        } else if constexpr (SLIDING) {
          k_ring.load_sliding(ring, key_tile * BLOCK_N, sequence.keys, sequence.end_key(), kv_head);
          v_ring.load_sliding(ring, key_tile * BLOCK_N, sequence.keys, sequence.end_key(), kv_head);
        } else {
          k_ring.load(ring, key_tile * BLOCK_N, kv_head, tile.batch);
          v_ring.load(ring, key_tile * BLOCK_N, kv_head, tile.batch);
        }
        ring.advance();
      }
      if constexpr (!PERSISTENT) break;
      if constexpr (SCHEDULE != Schedule::BALANCED) index = next_index(VARLEN ? ++turn : round + 1);
    }
  }
  if constexpr (CLUSTER > 1) __syncwarp(), cluster_wait();
