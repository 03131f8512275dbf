  // scores.cuh, a part of the kernel's body: S = Q Kᵀ of a tile of keys, over this block's slice of head_dim, then over
  // all slices.
  if constexpr (FUSED) {
    if constexpr (!SPREAD) cp_async_wait<1>();  // all but V[tile]
    if (!SPREAD || tile > 0) __syncthreads();   // Q and K[tile] are visible to all warps; none still reads tile - 1
    auto copy_ahead = [&]() {
      if (SPREAD && tile == 0) load_v(0);  // behind the first loads of Q and K, which are no copies
      if constexpr (STAGES == 2) load_k(tile + 1), load_v(tile + 1);
    };
    auto q_row = [&](int row) {
      if constexpr (Q_IN_SHARED) return q_smem + row * QK_STRIDE;
      else return q_row_gmem(row);
    };
    auto k_row = [&](int key) {
      if constexpr (K_IN_SHARED) return k_smem + stage_of(tile) * K_TILE + key * QK_STRIDE;
      else return k_row_gmem(tile * BLOCK_N + key);
    };
    float* tile_smem = IN_CLUSTER ? partial_smem : scores_smem;
    ScoreTiles::multiply<Element, SCORE_STRIDE>(tile_smem, q_row, k_row, reinterpret_cast<float4*>(sums_smem),
                                                copy_ahead);
    __syncthreads();  // the scores are visible to all warps, and none still reads K[tile] or P of tile - 1
    if constexpr (STAGES == 1) load_k(tile + 1);
  } else {
    if (STAGES != 1 && tile > 0) __syncthreads();  // no warp still reads the probabilities and V of tile - 1
    if constexpr (STAGES == 2) load_v(tile + 1);
  }
  auto vector_at = [](float* tile, int i) {
    return reinterpret_cast<float4*>(tile + i / ROW_VECTORS * SCORE_STRIDE) + i % ROW_VECTORS;
  };
  if constexpr (IN_CLUSTER) {
    cluster.sum([&](int i) { return *vector_at(partial_smem, i); },
                [&](int i) { return shared_address(vector_at(scores_smem, i)); }, tile);
  } else if constexpr (!FUSED) {
    const float4* tile_gmem = reinterpret_cast<const float4*>(partials_gmem + partials_at(tile, seqlen_k));
    if constexpr (DEPENDENT_LAUNCH) grid_dependency_wait();  // the first launch has ended
    for (int i = threadIdx.x; i < SUM_GROUPS * SCORES / 4; i += THREADS) {
      const int group = i / (SCORES / 4), vector = i % (SCORES / 4);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < PARTIALS; j++) {
        const int partial = group * PARTIALS + j;
        if (SUM_GROUPS * PARTIALS > DIM_SPLIT && partial >= DIM_SPLIT) break;
        const float4 part = tile_gmem[partial * (SCORES / 4) + vector];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      *vector_at(scores_smem + group * SCORE_TILE, vector) = sum;
    }
    __syncthreads();  // the scores are visible to all warps
  }
