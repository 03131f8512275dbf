  // key_loop.cuh, a part of the kernel's body: how a consumer warpgroup goes through tiles of rows and of keys.
  if (PING_PONG && warpgroup == WARPGROUPS - 1) pass_turn();  // the first turn is the first warpgroup's
  Ring ring, before;                                          // places of the next K, and of the V that P is for
  auto start_pv = [&] {
    mbarrier_wait(barrier(Smem::V_FULL, before.stage), before.parity);
    multiply_pv(before.stage);
  };
  auto finish_pv = [&] {
    wgmma_wait<0>();  // O is there, and P may be overwritten
    pin_registers(o);
    release(barrier(Smem::V_EMPTY, before.stage));
  };
  auto start_qk = [&] {
    mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);
    multiply_qk(ring.stage);
  };
  // Waits for S while a newer product, if any, is under way, and returns what its softmax does.
  auto finish_qk = [&](auto first, auto masked, auto newer) {
    if constexpr (Terms::BIASED) load_bias(bias, terms, row_terms(0), row_terms(8));  // beside the product
    wgmma_wait<decltype(newer)::value>();                                             // S is there
    pin_registers(s);
    if constexpr (RESCALE != Rescale::LAZY_AFTER) release(barrier(Smem::K_EMPTY, ring.stage));
    // The product has used Q in registers: a load is under way after its instruction, and wgmma of another block can
    // keep it from shared memory for longer than the copy of the next Q takes. The fence orders these reads before the
    // copy's writes.
    if constexpr (decltype(first)::value && PERSISTENT && Q_IN_REGISTERS) {
      fence_proxy_async(), __syncwarp(), release(barrier(Smem::Q_EMPTY, warpgroup));
    }
    const bool rescale = softmax(first, masked, ring.stage);
    key_tile -= KEY_SPLIT;
    if constexpr (RESCALE == Rescale::LAZY_AFTER) release(barrier(Smem::K_EMPTY, ring.stage));
    return rescale;
  };
  // Q Kᵀ of a tile of keys, then its softmax, with OVERLAP during P V of the one before, else followed by its own P V.
  auto step = [&](auto first, auto masked) {
    constexpr bool FIRST = decltype(first)::value;
    using Beside = Flag<OVERLAP && !FIRST>;
    if constexpr (Beside::value) wait_for_turn();
    start_qk();
    if constexpr (Beside::value) start_pv(), pass_turn();
    const bool rescale = finish_qk(first, masked, Beside{});
    if constexpr (Beside::value) finish_pv();
    pack_probabilities<Element>(p, s);
    if (!FIRST && rescale) scale_rows(o, factor);
    before = ring;
    ring.advance();
    if constexpr (!OVERLAP) start_pv(), finish_pv();
  };

  // The next tile of rows, once Q of this warpgroup has come; false if there is none.
  auto take_tile = [&](int round) {
    __syncwarp();  // the thread that stored the last tile is back: wgmma wants whole warps
    mbarrier_wait(barrier(Smem::Q_FULL, warpgroup), round % 2);
    if constexpr (PERSISTENT) {
      int words[Smem::TILE_BYTES / 4];
      // All lanes, before lane 0 releases Q.
      read_shared_words(smem_address + Smem::TILE + Smem::TILE_BYTES * (round % 2), lane, words);
      tile = Tile{words[0], words[1], words[2]}, range.word = words[3];
      if (tile.row_block < 0) return false;
      if constexpr (VARLEN) enter_sequence({words[4], words[5], 0, words[6]});
      if constexpr (SEQUSED) enter_keys(words[6]);
    }
    return true;
  };
  Ring skipped;  // AHEAD: the first place of V that is passed over
  auto begin_rows = [&] {
    state.clear();
    if constexpr (Terms::ADDED) {
#pragma unroll
      for (int i = 0; i < (GROUP_ROWS ? 2 : 1); ++i)
        head_terms[i] = terms.head(tile.batch, rows.head(tile, lane_row(tile) + 8 * i));
    }
    q.load(q_smem, thread / 32, lane);
    // All lanes have read the warp's rows of Q, which its rows of O may overwrite.
    if constexpr (Q_IN_REGISTERS) __syncwarp();
    key_tile = SCHEDULE == Schedule::BALANCED ? range.last() : last_key_tile(tile.row_block);
    if constexpr (CAUSAL_SKIP) {
      if constexpr (AHEAD) skipped = ring;
      const int last = max(0, mask.last_key(rows.query(first_row(tile) + 63))) / BLOCK_N;
      const int first = Mask::WINDOW ? first_key_tile(tile.row_block) : 0;
      // Not over the last that the producer brings, which `step` waits for: of every KEY_SPLIT-th, that may be behind
      // `first`.
      for (; key_tile > last && key_tile >= first + KEY_SPLIT; key_tile -= KEY_SPLIT) {
        mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);  // released unread, but not before it came
        release(barrier(Smem::K_EMPTY, ring.stage));
        wait_for_turn();
        pass_turn();
        if constexpr (!AHEAD) {
          mbarrier_wait(barrier(Smem::V_FULL, ring.stage), ring.parity);
          release(barrier(Smem::V_EMPTY, ring.stage));
        }
        ring.advance();
      }
    }
  };
  auto clear_output = [&] {
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) o[i] = 0.f;
  };
  // All tiles of keys but the first.
  auto rest_of_keys = [&] {
    // From here on it only counts: no other tile is masked. Terms ask which keys are in it.
    constexpr bool COUNTS = SCHEDULE == Schedule::BALANCED && !Terms::ADDED;
    if constexpr (COUNTS) key_tile -= range.first();
    if constexpr (SCHEDULE == Schedule::BALANCED && !COUNTS) {
#pragma unroll 1
      while (key_tile >= range.first()) step(False{}, Flag<Terms::MAY_HIDE>{});
      return;
    }
    if constexpr (Mask::WINDOW) {
      const int first = first_key_tile(tile.row_block);
      const int whole =
          Terms::MAY_HIDE ? key_tile + 1 : (mask.first_key(rows.query(first_row(tile) + 63)) + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
      for (;;) {  // twice at most: tiles at the upper edge and whole ones, then those at the lower edge
#pragma unroll 1
        while (key_tile >= first && (key_tile < whole || crosses_diagonal())) step(False{}, True{});
        if (key_tile < first) return;
#pragma unroll 1
        while (key_tile >= max(first, whole)) step(False{}, False{});
      }
    }
    if constexpr (Mask::ROWS_DIFFER || Terms::MAY_HIDE) {
#pragma unroll 1
      while (key_tile >= 0 && (Terms::MAY_HIDE || crosses_diagonal())) step(False{}, True{});
    }
    if constexpr (Terms::MAY_HIDE) return;
#pragma unroll 1
    while (key_tile >= 0) step(False{}, False{});
  };

  if constexpr (AHEAD) {
    if (take_tile(0) || !VARLEN) {  // a block has one at least, but where sequences are packed
      begin_rows();
      start_qk();
      finish_qk(True{}, False{}, False{});
      for (int round = 1;; ++round) {
        for (; CAUSAL_SKIP && skipped.stage != ring.stage; skipped.advance()) {  // fewer than STAGES: stages tell
          mbarrier_wait(barrier(Smem::V_FULL, skipped.stage), skipped.parity);
          release(barrier(Smem::V_EMPTY, skipped.stage));
        }
        pack_probabilities<Element>(p, s);
        before = ring;
        ring.advance();
        clear_output();
        rest_of_keys();
        const Tile last_tile = tile;
        const KeyRange last_range = range;
        const Sequence last_sequence = sequence;
        if (!take_tile(round)) {  // no branch around products under way: ptxas would wait for each (C7514)
          start_pv();
          finish_pv();
          finish_rows(last_tile, last_sequence, last_range, state);
          break;
        }
        RowState last_state = state;
        begin_rows();
        wait_for_turn();
        start_qk();
        start_pv();
        pass_turn();
        finish_qk(True{}, False{}, True{});
        finish_pv();
        finish_rows(last_tile, last_sequence, last_range, last_state);
        __syncwarp();  // the thread that stored these rows is back: wgmma wants whole warps
      }
    }
  } else {
    for (int round = 0;; ++round) {
      if (!take_tile(round)) break;
      begin_rows();
      clear_output();
      step(True{}, False{});
      rest_of_keys();
      if constexpr (PERSISTENT && !Q_IN_REGISTERS) release(barrier(Smem::Q_EMPTY, warpgroup));
      if constexpr (OVERLAP) {
        start_pv();
        if constexpr (INVERSE_BESIDE) {
          inverse_sums(state, terms, [&](int row) { return rows.head(tile, lane_row(tile) + row); }, inverse);
        }
        finish_pv();
      }
      if constexpr (IN_MEMORY) {
        merge_rows();
        break;
      }
      if constexpr (CLUSTER > 1) {
        const int slots = Smem::PARTIALS + warpgroup * Partial::BYTES, full = barrier(Smem::PARTIALS_FULL, 0);
        if (!Partial::gather<CLUSTER>(smem + slots, smem_address + slots, Smem::SLOT_BYTES, full, split, o, state,
                                      thread))
          break;
      }
      finish_rows(tile, sequence, range, state);
      if constexpr (!PERSISTENT) break;
    }
  }
  if (STORE != Store::ROWS && thread == 0) tma_store_wait_read();  // shared memory must live until it is read
  // Takes the turn that the last round left, so that the barrier ends as it began.
  if (PING_PONG && warpgroup == 0) wait_for_turn();
