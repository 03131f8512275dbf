  // query_loop.cuh, a part of the kernel's body: how a block of keys goes through tiles of queries.
  const int warp_key = key_warp * WARP_KEYS;  // in the block
  OwnRows<Element, Layout, KEY_TILES, DIM_STEPS, DIM_TILES, K_KEPT> k_rows;
  OwnRows<Element, ValueLayout, KEY_TILES, VALUE_STEPS, VALUE_TILES, V_KEPT> v_rows;
  k_rows.load(smem_address + warp_key * Layout::ROW_BYTES, k_gmem + warp_key * k_row_stride, k_row_stride,
              end_key - first_key - warp_key, lane);
  v_rows.load(smem_address + V_OFFSET + warp_key * ValueLayout::ROW_BYTES, v_gmem + warp_key * v_row_stride,
              v_row_stride, end_key - first_key - warp_key, lane);
  float dk[KEY_TILES][2 * DIM_BLOCKS][4], dv[KEY_TILES][2 * VALUE_BLOCKS][4];
  clear(dk);
  clear(dv);
  // Blocks of 16 columns of dK and dV that are the warp's, of every QUERY_WARPS-th.
  const int dim_blocks = (DIM_STEPS - query_warp + QUERY_WARPS - 1) / QUERY_WARPS;
  const int value_blocks = (VALUE_STEPS - query_warp + QUERY_WARPS - 1) / QUERY_WARPS;
  const int dq_row_warp = warp % DQ_WARPS, dq_column_warp = warp / DQ_WARPS;
  const int dq_blocks = (DIM_STEPS - dq_column_warp + DQ_COLUMN_WARPS - 1) / DQ_COLUMN_WARPS;
  // Lane offsets for ldmatrix in a stage of Q and dO: as B operands of Sᵀ and dPᵀ, and of dK and dV.
  const uint32_t q_chunks = query_warp * WARP_QUERIES * Layout::ROW_BYTES + Layout::chunks_first(lane);
  const uint32_t do_chunks = query_warp * WARP_QUERIES * ValueLayout::ROW_BYTES + ValueLayout::chunks_first(lane);
  const uint32_t q_columns = Layout::offset(lane % 16, 2 * query_warp + lane / 16);
  const uint32_t do_columns = ValueLayout::offset(lane % 16, 2 * query_warp + lane / 16);
  // Of dSᵀ and Pᵀ: rows of this warp as the A operand of dK and dV; queries as that of dQ, transposed.
  const uint32_t score_rows =
      smem_address + DS_OFFSET + warp_key * ScoreLayout::ROW_BYTES + ScoreLayout::rows_first(lane);
  const uint32_t dq_rows =
      smem_address + DS_OFFSET + ScoreLayout::offset(lane / 16 * 8 + lane % 8, 2 * dq_row_warp + lane / 8 % 2);
  const uint32_t dq_columns = smem_address + Layout::offset(lane % 16, 2 * dq_column_warp + lane / 16);

  const Queries unmasked = mask.that_see_all(first_key, BLOCK_N);
  // Those that see some key of the warp's.
  const Queries of_warp = {mask.first_query(first_key + warp_key),
                           mask.end_query(first_key + warp_key + WARP_KEYS - 1)};
  auto store_scores = [&](uint32_t tile_smem, const uint32_t(&x)[PART / 16][KEY_TILES][4], int part_query) {
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
      for (int n = 0; n < PART_TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_key + m * 16 + half * 8 + lane / 4;
          *reinterpret_cast<uint32_t*>(smem + tile_smem + ScoreLayout::offset(row, part_query / 8 + n) + lane % 4 * 4) =
              x[n / 2][m][n % 2 * 2 + half];
        }
  };

  const OwnGradients own_gradients{terms.own, TABLE_GRADIENT_ARGUMENTS};
  TableGradients<OwnGradients, KEY_TILES, PART_TILES> of_tables;
  of_tables.begin_head();
  int stage = 0, head = kv_head * group, tile = first_tile;
  if (QUERIES_SPLIT && begin > 0) head += begin / head_tiles, tile += begin % head_tiles;
  if (BlockStates::LISTED && end > 0) states.find<BLOCK_M>(batch, head, tile, list_block, lane);
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    cp_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
    __syncthreads();  // this tile is visible to all warps; none still reads the one before, its dS or its P
    if constexpr (STAGES > 1) copy_next();
    const uint32_t q_smem = smem_address + Q_OFFSET + stage * Q_TILE_BYTES;
    const uint32_t do_smem = smem_address + DO_OFFSET + stage * DO_TILE_BYTES;
    const float* rows_smem = reinterpret_cast<const float*>(smem + ROWS_OFFSET) + stage * 2 * BLOCK_M;
    const int first_query = tile * BLOCK_M;
    const Gradient gradient(terms, sequence_number, head, seqlen_q, seqlen_k);
    // Whether some key is hidden from some row of the tile.
    const bool asked = states.is_partial(batch, head, list_block, first_query);  // by mask and predicate
    const bool masked =
        BlockStates::LISTED ? asked || first_key + BLOCK_N > seqlen_k : !unmasked.contain(first_query, BLOCK_M);
#pragma unroll
    for (int part = 0; part < WARP_QUERIES / PART; ++part) {
      const int part_query = query_warp * WARP_QUERIES + part * PART;  // in the tile
      const int lane_query = part_query + lane % 4 * 2;
      if (HIDDEN_SKIPPED && (first_query + part_query + PART <= of_warp.first ||
                             (Mask::WINDOW && first_query + part_query >= of_warp.end))) {
        const uint32_t none[PART / 16][KEY_TILES][4] = {};
        if constexpr (DS_SHARED) store_scores(DS_OFFSET, none, part_query);
        if constexpr (P_SHARED) store_scores(P_OFFSET, none, part_query);
        continue;
      }
      float s[KEY_TILES][PART_TILES][4];
      multiply_rows<Element, Layout, DIM_STEPS>(s, k_rows, q_smem + q_chunks + part * PART * Layout::ROW_BYTES);
      float change[KEY_TILES][PART_TILES][4];  // KEEPS_CHANGE: of what a term is added to, by the product of Q and K
      float before[KEY_TILES][PART_TILES][4];  // OwnGradients: the scores that the expression is of
      uint32_t p[PART / 16][KEY_TILES][4], ds[PART / 16][KEY_TILES][4];
#pragma unroll
      for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first_key + warp_key + m * 16 + half * 8 + lane / 4;
          // Of the lane's queries from its first on, those from `first` on and before `last` see the key.
          const int from = first_query + lane_query;
          const int least = BlockStates::LISTED && !asked ? 0 : mask.first_query(key);
          const int first = key < seqlen_k ? least - from : PART, last = mask.end_query(key) - from;
#pragma unroll
          for (int n = 0; n < PART_TILES; ++n) {
            const float2 lse = *reinterpret_cast<const float2*>(rows_smem + lane_query + n * 8);
            float probability[2], factor[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float score = s[m][n][2 * half + e];
              float unchanged;
              factor[e] = gradient.change(score, unchanged, first_query + lane_query + n * 8 + e, key);
              if constexpr (OwnGradients::COUNT > 0) before[m][n][2 * half + e] = unchanged;
              if (masked && (n * 8 + e < first || (Mask::WINDOW && n * 8 + e >= last))) score = NEGATIVE_INFINITY;
              if (asked && !states.shows(terms, batch, head, from + n * 8 + e, key)) score = NEGATIVE_INFINITY;
              probability[e] = exp2_approx(fmaf(score, softmax_scale_log2, e == 0 ? -lse.x : -lse.y));
              if (Gradient::MAY_BE_NONE && probability[e] == 0.f) factor[e] = 0.f;
            }
            p[n / 2][m][n % 2 * 2 + half] = pack2<Element>(probability[0], probability[1]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              s[m][n][2 * half + e] = KEEPS_CHANGE ? probability[e] : probability[e] * factor[e];
              if constexpr (KEEPS_CHANGE) change[m][n][2 * half + e] = factor[e];
            }
          }
        }
      float dp[KEY_TILES][PART_TILES][4];
      multiply_rows<Element, ValueLayout, VALUE_STEPS>(dp, v_rows,
                                                       do_smem + do_chunks + part * PART * ValueLayout::ROW_BYTES);
      const LanePlace at{batch, head, first_query + lane_query, first_key + warp_key + lane / 4, terms.given.diagonal};
      of_tables.begin_part();
#pragma unroll
      for (int n = 0; n < PART_TILES; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(rows_smem + BLOCK_M + lane_query + n * 8);
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float low = s[m][n][2 * half] * (dp[m][n][2 * half] - delta.x);
            float high = s[m][n][2 * half + 1] * (dp[m][n][2 * half + 1] - delta.y);
            const float of_bias[2] = {low, high};
            if constexpr (OwnGradients::COUNT > 0) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (s[m][n][2 * half + e] == 0.f) continue;  // what is hidden may have no slope
                of_tables.add(own_gradients, at, 2 * m + half, n, e, before[m][n][2 * half + e], of_bias[e]);
              }
            }
            if constexpr (KEEPS_CHANGE) low *= change[m][n][2 * half], high *= change[m][n][2 * half + 1];
            ds[n / 2][m][n % 2 * 2 + half] = pack2<Element>(low, high);
            if constexpr (BIAS_GRADIENT) {
              const int key = first_key + warp_key + m * 16 + half * 8 + lane / 4;
              const int query = first_query + lane_query + n * 8;
              float* at =
                  dbias_gmem + batch * dbias_batch_stride + head * dbias_head_stride + query * dbias_row_stride + key;
              if (key < seqlen_k && query < seqlen_q) red_add(at, of_bias[0]);
              if (key < seqlen_k && query + 1 < seqlen_q) red_add(at + dbias_row_stride, of_bias[1]);
            }
          }
      }
      of_tables.end_part(own_gradients, at, lane);
      if constexpr (DS_SHARED) store_scores(DS_OFFSET, ds, part_query);
      if constexpr (P_SHARED) store_scores(P_OFFSET, p, part_query);
      if constexpr (!P_SHARED) {
#pragma unroll
        for (int k = 0; k < PART / 16; ++k) {
          add_product<Element, ValueLayout, 1>(dv, p[k], do_smem + do_columns, part * PART / 16 + k, VALUE_STEPS);
          add_product<Element, Layout, 1>(dk, ds[k], q_smem + q_columns, part * PART / 16 + k, DIM_STEPS);
        }
      }
    }
    if constexpr (DS_SHARED || STAGES == 1) __syncthreads();  // dS (and P) are visible to all warps
    if constexpr (P_SHARED) {
#pragma unroll
      for (int k = 0; k < BLOCK_M / 16; ++k) {
        uint32_t p[KEY_TILES][4], ds[KEY_TILES][4];
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m) {
          ldmatrix_x4(p[m], ScoreLayout::block_address(score_rows + P_OFFSET - DS_OFFSET, m, k));
          ldmatrix_x4(ds[m], ScoreLayout::block_address(score_rows, m, k));
        }
        add_product<Element, ValueLayout, QUERY_WARPS>(dv, p, do_smem + do_columns, k, value_blocks);
        add_product<Element, Layout, QUERY_WARPS>(dk, ds, q_smem + q_columns, k, dim_blocks);
      }
      if constexpr (STAGES == 1) __syncthreads();  // no warp still reads Q and dO
    }
    if constexpr (STAGES == 1) copy_next();
    if constexpr (DQ_ADDED) {
      float dq[DQ_ROW_TILES][2 * DQ_BLOCKS][4];
      clear(dq);
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        uint32_t ds[DQ_ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < DQ_ROW_TILES; ++m)
          ldmatrix_x4_trans(ds[m], ScoreLayout::block_address(dq_rows, k, m * DQ_WARPS));
        add_product<Element, Layout, DQ_COLUMN_WARPS>(dq, ds, dq_columns, k, dq_blocks);
      }
      float* tile_sums = sums_gmem + tile_number(batch, heads, head, query_tiles, first_query_slot + tile) *
                                         int64_t(BLOCK_M * 16 * DIM_STEPS);
      add_to_sums<VECTORS_ADDED, 2 * DIM_STEPS, DQ_WARPS, DQ_COLUMN_WARPS>(dq, tile_sums, dq_row_warp, dq_column_warp,
                                                                           dq_blocks, lane);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    const int last_head = head;
    if (++tile == first_tile + head_tiles) tile = first_tile, ++head;
    if (BlockStates::LISTED && step + 1 < end) states.find<BLOCK_M>(batch, head, tile, list_block, lane);
    if (OwnGradients::COUNT > 0 && (head != last_head || step + 1 == end)) {
      of_tables.end_head(own_gradients, {batch, last_head, 0, first_key + warp_key + lane / 4, terms.given.diagonal},
                         lane);
      of_tables.begin_head();
    }
  }
