  // row_terms.cuh, a part of the kernel's body: the terms of a tile's rows, those of `device/backward/row_terms.cuh`.
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
  const int head = blockIdx.y, batch = blockIdx.z;
  BlockStates{BLOCK_STATES_ARGUMENTS}.write<BLOCK_M>(batch, head, blockIdx.x);
  int tile = blockIdx.x, first_query = 0, head_rows = seqlen_q;
  Terms terms{VARIANT_ARGUMENTS};
  if constexpr (OwnGradients::WANTED) {
    OwnGradients{terms.own, TABLE_GRADIENT_ARGUMENTS}.clear(block * ROW_THREADS + threadIdx.x, threads);
  }
  if constexpr (VARLEN) {
    const PackedSequences packed{terms.given.query_starts, terms.given.key_starts, terms.given.sequences, seqlen_q,
                                 seqlen_k};
    const int number = packed.at_slot<BLOCK_M>(tile);
    const Sequence sequence = packed.at(number);
    tile -= packed.first_slot<BLOCK_M>(number);
    seqlen_q = sequence.queries, first_query = sequence.first_query, head_rows = terms.given.total_queries;
  }
  const int64_t row = first_query + tile * BLOCK_M, place = (int64_t(batch) * heads + head) * head_rows + row;
  float* tile_gmem = rows_gmem + tile_number(batch, heads, head, gridDim.x, blockIdx.x) * (2 * BLOCK_M);
  using Deltas = RowDeltas<Element, BLOCK_M, VALUE_DIM, ROW_THREADS>;
  if (VARLEN && tile * BLOCK_M >= seqlen_q) Deltas::write_none(tile_gmem, tile_gmem + BLOCK_M);
  else
    Deltas::write(tile_gmem, tile_gmem + BLOCK_M,
                  o_gmem + batch * o_batch_stride + head * o_head_stride + row * o_row_stride, o_row_stride,
                  do_gmem + batch * do_batch_stride + head * do_head_stride + row * do_row_stride, do_row_stride,
                  lse_gmem + place, dlse_gmem ? dlse_gmem + place : nullptr, seqlen_q - tile * BLOCK_M);
  if constexpr (SINK_GRADIENT) {  // what the tile adds to -dsink: the sink's probability times delta
    __syncthreads();              // the tile's terms are there
    if (threadIdx.x < 32) {
      const float sink = to_float(terms.given.sinks[head]) * 1.44269504088896341f;
      float sum = 0.f;
      for (int i = threadIdx.x; i < BLOCK_M; i += 32) {
        sum = fmaf(exp2_approx(sink - tile_gmem[i]), tile_gmem[BLOCK_M + i], sum);
      }
#pragma unroll
      for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, away);
      if (threadIdx.x == 0) sink_sums[tile_number(batch, heads, head, gridDim.x, blockIdx.x)] = sum;
    }
  }
