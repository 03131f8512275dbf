  // products.cuh, a part of the kernel's body: what a consumer warpgroup holds, its two products and its softmax.
  const int thread = threadIdx.x % 128;  // of the warpgroup
  if (STORE != Store::ROWS && thread == 0 && split == 0) prefetch_tensor_map(o_map);
  if constexpr (CLUSTER > 1) cluster_arrive();
  named_barrier_sync<THREADS>(BARRIERS_READY);  // the barriers are initialised
  if constexpr (CONSUMER_REGISTERS > 0) increase_registers<CONSUMER_REGISTERS>();

  const uint32_t q_smem = smem_address + warpgroup * Smem::Q_PLACE_BYTES,
                 o_smem = smem_address + Smem::O + warpgroup * Smem::O_BYTES;
  const uint64_t k_descriptor = matrix_descriptor(k_smem, 0);
  const uint64_t v_descriptor = matrix_descriptor(v_smem, BLOCK_N * 128);
  RowOperand<HEAD_DIM, Q_IN_REGISTERS> q;
  float s[BLOCK_N / 2];      // scores, then probabilities, of a tile
  uint32_t p[KEY_STEPS][4];  // probabilities of a tile, rounded
  float o[VALUE_DIM / 2];
  float factor[2];  // by which the last softmax wants O rescaled
  RowState state;

  auto multiply_qk = [&](int stage) {  // S = Q Kᵀ
    wgmma_fence();
    const uint64_t k_stage = k_descriptor + descriptor_step(Smem::K_TILE_BYTES) * stage;
#pragma unroll
    for (int step = 0; step < Tiles::DIM_STEPS; ++step) {
      wgmma_qk(s, q[step], k_stage + descriptor_step(Tiles::step_offset(step, BLOCK_N)), step > 0);
    }
    wgmma_commit();
  };
  auto multiply_pv = [&](int stage) {  // O += P V
    wgmma_fence();
    const uint64_t v_stage = v_descriptor + descriptor_step(Smem::V_TILE_BYTES) * stage;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) wgmma_pv(o, p[step], v_stage + descriptor_step(step * 16 * 128), true);
    wgmma_commit();
  };
  auto release = [&](uint32_t barrier_smem) {
    if (lane == 0) mbarrier_arrive(barrier_smem);
  };  // this warp is done with what it guards
  auto wait_for_turn = [&] {
    if constexpr (PING_PONG) named_barrier_sync<256>(TURN + warpgroup);
  };
  auto pass_turn = [&] {
    if constexpr (PING_PONG) named_barrier_arrive<256>(TURN + (warpgroup + 1) % WARPGROUPS);
  };

  KeyRange range;                                     // BALANCED: of this tile of rows
  HeadTerms<Element> head_terms[GROUP_ROWS ? 2 : 1];  // of this tile of rows, of the lane's rows g and g + 8
  int key_tile;                                       // the next
  auto first_row = [&](const Tile& of) { return of.row_block * BLOCK_M + warpgroup * 64; };  // of this warpgroup

  auto lane_row = [&](const Tile& of) { return first_row(of) + thread / 32 * 16 + lane / 4; };  // row g of this lane

  BiasPair<Element> bias[Terms::BIASED ? BLOCK_N / 4 : 1];  // of the next tile of keys

  // The terms of the lane's rows g and g + 8 in the next tile of keys.
  auto row_terms = [&](int row) {
    const int lane_key = key_tile * BLOCK_N + lane % 4 * 2;
    return terms.row(head_terms[GROUP_ROWS ? row / 8 : 0], rows.query(lane_row(tile) + row), lane_key, seqlen_q,
                     seqlen_k);
  };
  // What a variant does to S.
  auto change_scores = [&] { change_tile(s, bias, terms, row_terms(0), row_terms(8)); };
  // S = S masked, P = exponentials; returns whether O must be rescaled by `factor` before P V is added.
  auto softmax = [&](auto first, auto masked, int stage) {
    constexpr bool FIRST = decltype(first)::value, MASKED = decltype(masked)::value;
    if constexpr (Terms::ANY) change_scores();
    if (MASKED || (FIRST && (Mask::ROWS_DIFFER || (key_tile + 1) * BLOCK_N > seqlen_k))) {
      if constexpr (GROUP_ROWS) {
        const auto low = mask.keys_from(rows.query(lane_row(tile)), 0),
                   high = mask.keys_from(rows.query(lane_row(tile) + 8), 0);
        mask_scores(s, key_tile * BLOCK_N, KeysOfTwo{low, high}, lane);
      } else {
        mask_scores(s, key_tile * BLOCK_N, mask.keys_from(lane_row(tile), 0), lane);
      }
    }
    return softmax_tile<RESCALE, LAZY_OCTAVES, POLYNOMIAL_EIGHTHS, FIRST, MASKED>(
        state, s, softmax_scale_log2, factor, [&] {
          scores_again<Element, HEAD_DIM, BLOCK_N>(s, q, q_smem, k_smem + stage * Smem::K_TILE_BYTES, thread / 32,
                                                   lane);
          if constexpr (Terms::ANY) change_scores();
        });
  };
  // Not all rows of the warpgroup see this tile and the first key of the one before: a row's first visible key may be
  // in this one.
  auto crosses_diagonal = [&] {
    return Mask::ROWS_DIFFER && (key_tile + KEY_SPLIT) * BLOCK_N > mask.last_key(rows.query(first_row(tile)));
  };
