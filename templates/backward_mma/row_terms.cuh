  // row_terms.cuh, a part of the kernel's body: delta = rowsum(dO O) - dlse of the rows of a tile, and their
  // log-sum-exps in powers of two; +inf where there is no row, or one that sees no key, whose probabilities so become 0.
  // Besides, all blocks together zero what later launches add to.
  const int64_t block = blockIdx.x + int64_t(gridDim.x) * (blockIdx.y + int64_t(gridDim.y) * blockIdx.z);
  const int64_t threads = int64_t(gridDim.x) * gridDim.y * gridDim.z * ROW_THREADS;
  const float4 nothing = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int64_t i = block * ROW_THREADS + threadIdx.x; i < zeros / 4; i += threads) {
    reinterpret_cast<float4*>(sums_gmem)[i] = nothing;
  }
  if constexpr (BIAS_GRADIENT) {
    for (int64_t i = block * ROW_THREADS + threadIdx.x; i < bias_zeros / 4; i += threads) {
      reinterpret_cast<float4*>(dbias_gmem)[i] = nothing;
    }
  }
  const int head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t all_rows = seqlen_q;
  int tile = blockIdx.x, first_query = 0;
  Terms terms{VARIANT_ARGUMENTS};
  if constexpr (VARLEN) {
    const PackedSequences packed{terms.given.query_starts, terms.given.key_starts, terms.given.sequences, seqlen_q,
                                 seqlen_k};
    const int number = packed.at_slot<BLOCK_M>(tile);
    const Sequence sequence = packed.at(number);
    tile -= packed.first_slot<BLOCK_M>(number);
    seqlen_q = sequence.queries, first_query = sequence.first_query;
  }
  const int64_t rows_a_head = VARLEN ? terms.given.total_queries : all_rows;
  const Element* o_head_gmem = o_gmem + batch * o_batch_stride + head * o_head_stride;
  const Element* do_head_gmem = do_gmem + batch * do_batch_stride + head * do_head_stride;
  float* tile_gmem = rows_gmem + tile_number(batch, heads, head, gridDim.x, blockIdx.x) * (2 * BLOCK_M);
  for (int row = warp; row < BLOCK_M; row += ROW_THREADS / 32) {
    const int query = tile * BLOCK_M + row;
    float lse = -NEGATIVE_INFINITY, delta = 0.f;
    if (query < seqlen_q) {
      const int64_t at = first_query + query;
      float sum = 0.f;
      for (int chunk = lane; chunk < VALUE_TILES; chunk += 32) {
        float o[8], d[8];
        to_floats(load_vector<8>(o_head_gmem + at * o_row_stride + chunk * 8), o);
        to_floats(load_vector<8>(do_head_gmem + at * do_row_stride + chunk * 8), d);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(o[e], d[e], sum);
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
      const int64_t place = (int64_t(batch) * heads + head) * rows_a_head + at;
      const float natural = lse_gmem[place];
      if (natural > NEGATIVE_INFINITY) {
        lse = natural * 1.44269504088896341f;
        delta = sum - (dlse_gmem != nullptr ? dlse_gmem[place] : 0.f);
      }
    }
    if (lane == 0) tile_gmem[row] = lse, tile_gmem[BLOCK_M + row] = delta;
  }
