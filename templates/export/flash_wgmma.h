// flash_wgmma: one launch; blocks for each tile of rows, or one wave of persistent blocks that share the tiles.

struct Config : Compiled {
  int block_m, block_n, blocks_per_sm, key_split, heads_in_turn, warpgroups, warpgroup_rows, threads, smem_bytes;
  int result_bytes, max_key_tiles, max_rows;
  int held_bytes, idle_part;  // for gangs
  int cluster, merge_words;   // merge_words: for each tile of rows, 0 where results are not merged in memory
  bool persistent, claimed, balanced, store_chunks, group_rows;
};

inline int64_t row_blocks_of(const Problem& p, const Config& c) {
  return ceil_div(p.seqlen_q * (c.group_rows ? group_slots(p) : 1), c.block_m);
}

inline int64_t common_multiple(int64_t a, int64_t b) {
  int64_t multiple = a;
  while (multiple % b) multiple += a;
  return multiple;
}

// Blocks of a gang of a balanced schedule (evoattn/families/gangs.py), of `tiles` and so many blocks at once.
inline int64_t gang_size(const Problem& p, const Config& c, int64_t tiles, int64_t slots) {
  const int64_t key_bytes = int64_t(2) * p.batch * p.kv_heads * p.seqlen_k * c.head_dim * c.element_bytes;
  const int64_t cut = tiles - larger(0, tiles / slots - 1) * slots;
  const int64_t own = c.group_rows ? p.kv_heads : p.heads, step = larger(1, c.heads_in_turn);
  const bool lines = p.kv_heads > 1 && p.k.head < p.k.row && c.head_dim * c.element_bytes % CHUNK_BYTES;
  const int64_t near = lines ? own : own / p.kv_heads;
  const int64_t sharing = c.heads_in_turn ? row_blocks_of(p, c) * common_multiple(c.heads_in_turn, near) : near;
  const int64_t apart = smaller(cut, (sharing - 1) * (cut - slots));
  if (tiles <= slots || key_bytes * apart / tiles <= c.held_bytes) return 1;
  for (int64_t size = smaller(sharing, slots) / step * step; size > step; size -= step) {
    const int64_t idle = slots % size;
    if (sharing % size == 0 && tiles % size == 0 && tiles > slots - idle && idle * c.idle_part * tiles <= slots * cut)
      return size;
  }
  return 1;
}

inline Size grid_of(const Problem& p, const Config& c, int sm_count) {
  const int64_t row_blocks = row_blocks_of(p, c);
  const int64_t heads = c.group_rows ? p.kv_heads : p.heads, all_heads = heads * p.batch;
  const int64_t tiles = row_blocks * all_heads, split = c.key_split, turn = c.heads_in_turn;
  if (c.persistent) {  // one wave; balanced blocks are fewer than the tiles, which they share
    const int64_t slots = int64_t(sm_count) * c.blocks_per_sm;
    if (!c.balanced) return {smaller(tiles, slots), 1, 1};
    const int64_t gang = gang_size(p, c, tiles, slots);
    return {gang, larger(1, smaller(tiles - 1, slots / gang)), 1};
  }
  if (turn == 0) return {heads * split, p.batch, row_blocks};
  if (turn == 1) return {row_blocks * split, heads, p.batch};
  return {turn * split, row_blocks, ceil_div(all_heads, turn)};
}

inline Plan plan(const Problem& p, const Config& c, int sm_count) {
  Plan plan{};
  if (c.balanced && ceil_div(p.seqlen_k, c.block_n) > c.max_key_tiles)
    plan.refusal = "There are more keys than this kernel's balanced schedule can count.";
  if (row_blocks_of(p, c) * c.block_m > c.max_rows)
    plan.refusal = "There are more rows of a head, to the end of the last tile, than an int32 counts.";
  const Size grid = grid_of(p, c, sm_count);
  const int64_t tiles = row_blocks_of(p, c) * (c.group_rows ? p.kv_heads : p.heads) * p.batch;
  if (c.merge_words && tiles * c.key_split > int64_t(sm_count) * c.blocks_per_sm)
    plan.refusal = "The blocks that wait for one another are more than this device runs at once.";
  const int64_t results = c.warpgroups * (c.merge_words ? tiles * c.key_split : grid.x * grid.y);
  const int64_t words = c.merge_words ? tiles * c.merge_words : c.balanced ? results : 1;
  Launch& launch = plan.add("flash_wgmma", grid, c.threads, c.smem_bytes);
  launch.cluster.x = c.cluster;

  launch.map(c.group_rows ? group_map(p, c, Q, c.warpgroup_rows) : tile_map(p, c, Q, c.warpgroup_rows));
  launch.map(tile_map(p, c, K, c.block_n));
  launch.map(tile_map(p, c, V, c.block_n));
  launch.map(c.group_rows ? group_map(p, c, O, c.warpgroup_rows) : tile_map(p, c, O, c.warpgroup_rows, c.store_chunks));
  launch.buffer(O);
  if (c.writes_lse) launch.buffer(LSE);
  else launch.int64(0);
  if (c.claimed || c.balanced || c.merge_words) launch.buffer(plan.add_scratch("counters_zeroed", 4 * words, true));
  else launch.int64(0);
  if (c.balanced || c.merge_words) launch.buffer(plan.add_scratch("results", results * c.result_bytes));
  else launch.int64(0);
  for (int n : {p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k}) launch.int32(n);
  launch.strides(p.o);
  launch.float32(softmax_scale_log2(p));
  return plan;
}
