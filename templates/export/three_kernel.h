// three_kernel: S = Q K^T into scratch memory, softmax over its rows, O = P V; in two launches where P V merges maxima.

struct Config : Compiled {
  int block_m, block_n, tiles_a_block, rows_per_block, pv_block_m, pv_block_k;
  int scores_threads, softmax_threads, values_threads, scores_smem_bytes, values_smem_bytes;
  int score_bytes, score_map_dtype, keys_a_maximum;
  bool own_p, tile_softmax, merges_late, wgmma, overlaps;
};

// Chunks of 64 rows of S or P, of whose rows the first `columns` count.
inline TensorMap score_map(const Problem& p, int buffer, int dtype, int64_t stride, int64_t columns) {
  const uint64_t row = stride * 2, seqlen = p.seqlen_q, heads = p.heads, batch = p.batch;
  return {buffer,
          dtype,
          4,
          {uint64_t(columns), seqlen, heads, batch},
          {row, row * seqlen, row * seqlen * heads},
          {CHUNK_COLUMNS, CHUNK_COLUMNS, 1, 1}};
}

inline void counts(Launch& launch, const Problem& p) {
  for (int n : {p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k}) launch.int32(n);
}

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const int64_t heads = int64_t(p.heads) * p.batch, query_rows = heads * p.seqlen_q;
  const int64_t stride = ceil_div(p.seqlen_k, 8) * 8;  // elements of a row of S: whole 16-byte chunks
  if (query_rows > INT32_MAX) plan.refusal = "There are more queries over all heads than an int counts.";

  const int s = plan.add_scratch("s", query_rows * stride * c.score_bytes);
  const int probabilities = c.own_p ? plan.add_scratch("p", query_rows * stride * 2) : s;
  const int64_t maxima = ceil_div(p.seqlen_k, c.keys_a_maximum);
  const int of_tiles = c.tile_softmax ? plan.add_scratch("tiles", 8 * query_rows * maxima) : 0;
  const int of_rows = c.merges_late ? 0 : plan.add_scratch("rows", 8 * query_rows);
  const int tiles = c.tile_softmax ? of_tiles : of_rows, rows = c.merges_late ? tiles : of_rows;

  const int64_t key_blocks = ceil_div(p.seqlen_k, c.block_n * c.tiles_a_block);
  const Size scores_grid{key_blocks, ceil_div(p.seqlen_q, c.block_m), heads};
  Launch& scores = plan.add("three_kernel_scores", scores_grid, c.scores_threads, c.scores_smem_bytes);
  if (c.wgmma) {
    scores.map(tile_map(p, c, Q, CHUNK_COLUMNS));
    scores.map(tile_map(p, c, K, c.block_n));
    scores.map(score_map(p, s, c.score_map_dtype, stride, stride));
    scores.buffer(tiles);
    counts(scores, p);
  } else {
    for (int id : {int(Q), int(K), s, tiles}) scores.buffer(id);
    counts(scores, p);
    scores.int32(stride);
    for (const Strides& of : {p.q, p.k}) scores.strides(of);
  }
  scores.float32(softmax_scale_log2(p));

  if (!c.merges_late) {
    const Size softmax_grid{ceil_div(query_rows, c.rows_per_block), 1, 1};
    Launch& softmax = plan.add("three_kernel_softmax", softmax_grid, c.softmax_threads, 0);
    softmax.overlaps = c.overlaps;
    if (c.tile_softmax) softmax.buffer(tiles);
    else softmax.buffer(s), softmax.buffer(probabilities);
    softmax.buffer(rows);
    for (int64_t n : {query_rows, int64_t(p.seqlen_q), int64_t(p.seqlen_k)}) softmax.int32(n);
    if (!c.tile_softmax) softmax.int32(stride);
  }

  const Size values_grid{ceil_div(p.seqlen_q, c.pv_block_m), heads, 1};
  Launch& values = plan.add("three_kernel_values", values_grid, c.values_threads, c.values_smem_bytes);
  values.overlaps = c.overlaps;
  if (c.wgmma) {
    values.map(score_map(p, probabilities, c.map_dtype, stride, p.seqlen_k));
    values.map(tile_map(p, c, V, c.pv_block_k));
    for (int id : {tiles, rows, int(O)}) values.buffer(id);
    counts(values, p);
    values.strides(p.o);
  } else {
    for (int id : {probabilities, tiles, rows, int(V), int(O)}) values.buffer(id);
    counts(values, p);
    values.int32(stride);
    for (const Strides& of : {p.v, p.o}) values.strides(of);
  }
  return plan;
}
