  // query_pass.cuh, a part of the kernel's body: dQ of a tile of PASS_M queries, through the keys that they see.
  constexpr int PASS_THREADS = 32 * PASS_WARPS, WARP_ROWS = PASS_M / PASS_WARPS, ROW_TILES = WARP_ROWS / 16;
  constexpr int PASS_TILES = PASS_N / 8;
  constexpr int PASS_DO_OFFSET = PASS_M * Layout::ROW_BYTES;
  constexpr int PASS_K_OFFSET = PASS_DO_OFFSET + PASS_M * ValueLayout::ROW_BYTES;
  constexpr int PASS_K_BYTES = PASS_N * Layout::ROW_BYTES, PASS_V_BYTES = PASS_N * ValueLayout::ROW_BYTES;
  constexpr int PASS_V_OFFSET = PASS_K_OFFSET + PASS_STAGES * PASS_K_BYTES;
  static_assert(PASS_V_OFFSET + PASS_STAGES * PASS_V_BYTES == PASS_SMEM_BYTES, "Python and CUDA disagree");
  static_assert(PASS_M == 16 * ROW_TILES * PASS_WARPS && PASS_N % 16 == 0, "whole mma tiles in every warp");
  using CopyQRows = TileCopy<Layout, PASS_M, DIM_TILES, PASS_THREADS>;
  using CopyDoRows = TileCopy<ValueLayout, PASS_M, VALUE_TILES, PASS_THREADS>;
  using CopyKeys = TileCopy<Layout, PASS_N, DIM_TILES, PASS_THREADS>;
  using CopyValues = TileCopy<ValueLayout, PASS_N, VALUE_TILES, PASS_THREADS>;
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t smem_address = shared_address(smem);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0);
  const int grid_rows = (HEADS_FASTEST ? gridDim.z : gridDim.x) - SINK_GRADIENT;
  const int grid_row = HEADS_FASTEST ? blockIdx.z : blockIdx.x;
  const int head = HEADS_FASTEST ? blockIdx.x : blockIdx.y, batch = HEADS_FASTEST ? blockIdx.y : blockIdx.z;
  const int kv_head = head / (heads / kv_heads);
  int row_block = Mask::LAST_FIRST ? grid_rows - 1 - grid_row : grid_row;
  int sequence_number = batch, first_slot = 0;
  Terms terms{VARIANT_ARGUMENTS};
  if constexpr (VARLEN) {
    const PackedSequences packed{terms.given.query_starts, terms.given.key_starts, terms.given.sequences, seqlen_q,
                                 seqlen_k};
    sequence_number = packed.at_slot<PASS_M>(row_block);
    const Sequence sequence = packed.at(sequence_number);
    row_block -= packed.first_slot<PASS_M>(sequence_number);
    if (row_block * PASS_M >= sequence.queries) return;
    seqlen_q = sequence.queries, seqlen_k = sequence.keys;
    first_slot = packed.first_slot<BLOCK_M>(sequence_number);
    q_gmem += sequence.first_query * q_row_stride, do_gmem += sequence.first_query * do_row_stride;
    dq_gmem += sequence.first_query * dq_row_stride;
    k_gmem += sequence.first_key * k_row_stride, v_gmem += sequence.first_key * v_row_stride;
    terms.given.diagonal = CAUSAL && !CAUSAL_LOWER_RIGHT ? 0 : seqlen_k - seqlen_q;
  }
  if constexpr (SEQUSED) seqlen_k = terms.template keys_in_use<Mask::ENDS_WITH_KEYS>(batch, seqlen_k);
  const int block_row = row_block * PASS_M, warp_row = block_row + warp * WARP_ROWS;
  q_gmem += batch * q_batch_stride + head * q_head_stride + block_row * q_row_stride;
  do_gmem += batch * do_batch_stride + head * do_head_stride + block_row * do_row_stride;
  dq_gmem += batch * dq_batch_stride + head * dq_head_stride + block_row * dq_row_stride;
  k_gmem += batch * k_batch_stride + kv_head * k_head_stride;
  v_gmem += batch * v_batch_stride + kv_head * v_head_stride;

  const Mask mask(seqlen_q, seqlen_k, terms.given.window);
  const int block_keys = mask.keys_before(min(block_row + PASS_M, seqlen_q));
  const int first_block_key = Mask::WINDOW ? mask.first_key(block_row) / PASS_N * PASS_N : 0;
  const BlockStates states{BLOCK_STATES_ARGUMENTS};
  const ListedTiles<PASS_N> listed(KeyList{KEY_LIST_ARGUMENTS}, batch, head, block_row);
  const int band_tiles = block_keys > first_block_key ? (block_keys - first_block_key + PASS_N - 1) / PASS_N : 0;
  const int tiles = KeyList::LISTED ? listed.tiles : band_tiles;
  auto key_of = [&](int tile) { return KeyList::LISTED ? listed.first_key(tile) : first_block_key + tile * PASS_N; };
  const Gradient gradient(terms, sequence_number, head, seqlen_q, seqlen_k);

  auto copy_keys = [&](int tile) {
    if (tile < tiles) {
      const int key = key_of(tile), stage = tile % PASS_STAGES;
      CopyKeys::copy(smem_address + PASS_K_OFFSET + stage * PASS_K_BYTES,
                     CopyKeys::thread_source(k_gmem + key * k_row_stride, k_row_stride), k_row_stride, seqlen_k - key);
      CopyValues::copy(smem_address + PASS_V_OFFSET + stage * PASS_V_BYTES,
                       CopyValues::thread_source(v_gmem + key * v_row_stride, v_row_stride), v_row_stride,
                       seqlen_k - key);
    }
    cp_async_commit();
  };
  CopyQRows::copy(smem_address, CopyQRows::thread_source(q_gmem, q_row_stride), q_row_stride, seqlen_q - block_row);
  CopyDoRows::copy(smem_address + PASS_DO_OFFSET, CopyDoRows::thread_source(do_gmem, do_row_stride), do_row_stride,
                   seqlen_q - block_row);
#pragma unroll
  for (int i = 0; i < (PASS_STAGES > 1 ? PASS_STAGES - 1 : 1); ++i) copy_keys(i);
  // Zeros for the upper half of the last k-step: no copy writes there, so once is enough.
  auto zero_chunk = [&](auto layout, int offset, int rows, int chunk) {
    for (int row = threadIdx.x; row < rows; row += PASS_THREADS) {
      *reinterpret_cast<uint4*>(smem + offset + layout.offset(row, chunk)) = make_uint4(0, 0, 0, 0);
    }
  };
  if constexpr (DIM_TILES % 2 != 0) {
    zero_chunk(Layout{}, 0, PASS_M, DIM_TILES);
    zero_chunk(Layout{}, PASS_K_OFFSET, PASS_STAGES * PASS_N, DIM_TILES);
  }
  if constexpr (VALUE_TILES % 2 != 0) {
    zero_chunk(ValueLayout{}, PASS_DO_OFFSET, PASS_M, VALUE_TILES);
    zero_chunk(ValueLayout{}, PASS_V_OFFSET, PASS_STAGES * PASS_N, VALUE_TILES);
  }

  float lse[ROW_TILES][2], delta[ROW_TILES][2];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + m * 16 + half * 8 + lane / 4;
      lse[m][half] = -NEGATIVE_INFINITY, delta[m][half] = 0.f;
      if (row < seqlen_q) {
        const float* tile_gmem =
            rows_gmem + tile_number(batch, heads, head, query_tiles, first_slot + row / BLOCK_M) * (2 * BLOCK_M);
        lse[m][half] = tile_gmem[row % BLOCK_M], delta[m][half] = tile_gmem[BLOCK_M + row % BLOCK_M];
      }
    }
  OwnRows<Element, Layout, ROW_TILES, DIM_STEPS, DIM_TILES, false> q_rows;
  OwnRows<Element, ValueLayout, ROW_TILES, VALUE_STEPS, VALUE_TILES, false> do_rows;
  q_rows.load(smem_address + warp * WARP_ROWS * Layout::ROW_BYTES, q_gmem, 0, 0, lane);
  do_rows.load(smem_address + PASS_DO_OFFSET + warp * WARP_ROWS * ValueLayout::ROW_BYTES, do_gmem, 0, 0, lane);
  float dq[ROW_TILES][2 * DIM_STEPS][4];
  clear(dq);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<(PASS_STAGES > 1 ? PASS_STAGES - 2 : 0)>();
    __syncthreads();  // this tile of K and V is visible to all warps; none still reads the one before
    if constexpr (PASS_STAGES > 1) copy_keys(tile + PASS_STAGES - 1);
    const uint32_t k_smem = smem_address + PASS_K_OFFSET + tile % PASS_STAGES * PASS_K_BYTES;
    const uint32_t v_smem = smem_address + PASS_V_OFFSET + tile % PASS_STAGES * PASS_V_BYTES;
    const int first_key = key_of(tile);
    const bool asked = listed.is_partial(tile);  // by mask and predicate
    const bool masked = KeyList::LISTED ? asked || first_key + PASS_N > seqlen_k
                                        : first_key + PASS_N > mask.keys_of(warp_row) ||
                                              (Mask::WINDOW && first_key < mask.first_key(warp_row + WARP_ROWS - 1));
    float s[ROW_TILES][PASS_TILES][4], dp[ROW_TILES][PASS_TILES][4];
    multiply_rows<Element, Layout, DIM_STEPS>(s, q_rows, k_smem + Layout::chunks_first(lane));
    multiply_rows<Element, ValueLayout, VALUE_STEPS>(dp, do_rows, v_smem + ValueLayout::chunks_first(lane));
    uint32_t ds[PASS_N / 16][ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + m * 16 + half * 8 + lane / 4, lane_key = first_key + lane % 4 * 2;
        // Of the lane's keys from its first on, the row sees those from `first` on and before `end`.
        const int end = (KeyList::LISTED && !asked ? seqlen_k : mask.keys_of(row)) - lane_key;
        const int first = mask.first_key(row) - lane_key;
#pragma unroll
        for (int n = 0; n < PASS_TILES; ++n) {
          float gradients[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float score = s[m][n][2 * half + e];
            float factor = gradient.change(score, row, lane_key + n * 8 + e);
            if (masked && (n * 8 + e >= end || (Mask::WINDOW && n * 8 + e < first))) score = NEGATIVE_INFINITY;
            if (asked && !states.shows(terms, batch, head, row, lane_key + n * 8 + e)) score = NEGATIVE_INFINITY;
            const float probability = exp2_approx(fmaf(score, softmax_scale_log2, -lse[m][half]));
            if (Gradient::MAY_BE_NONE && probability == 0.f) factor = 0.f;
            gradients[e] = probability * factor * (dp[m][n][2 * half + e] - delta[m][half]);
          }
          ds[n / 2][m][n % 2 * 2 + half] = pack2<Element>(gradients[0], gradients[1]);
        }
      }
#pragma unroll
    for (int k = 0; k < PASS_N / 16; ++k) {
      add_product<Element, Layout, 1>(dq, ds[k], k_smem + Layout::rows_first(lane), k, DIM_STEPS);
    }
    if constexpr (PASS_STAGES == 1) {
      __syncthreads();  // no warp still reads K and V
      copy_keys(tile + 1);
    }
  }
  cp_async_wait<0>();  // without a key Q is still on its way
  __syncthreads();     // no warp still reads Q, which dQ overwrites
  store_rows<Element, Layout, 1>(dq, softmax_scale, smem, warp * WARP_ROWS, 0, DIM_STEPS, lane);
  __syncthreads();  // all of dQ is there
  copy_out<Layout, PASS_M, DIM_TILES, PASS_THREADS>(smem, dq_gmem, dq_row_stride, seqlen_q - block_row);
