// large_head: a block for each slice of columns of each tile of rows; unless it is fused, before that a launch with one
// for each tile of keys too, which leaves partial scores in scratch memory.

struct Config : Compiled {
  int block_m, block_n, dim_split, threads, scores_smem_bytes, smem_bytes;
  bool fused, in_cluster, overlaps;
};

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const int64_t row_tiles = ceil_div(int64_t(p.heads / p.kv_heads) * p.seqlen_q, c.block_m);
  const int64_t key_tiles = ceil_div(p.seqlen_k, c.block_n);
  const Size grid{row_tiles * c.dim_split, 1, int64_t(p.kv_heads) * p.batch};
  if (c.fused) {
    Launch& launch = plan.add("large_head", grid, c.threads, c.smem_bytes);
    launch.cluster.x = c.in_cluster ? c.dim_split : 1;
    attention_args(launch, p);
    launch.int64(0);  // no scratch memory
    return plan;
  }
  const int64_t tiles = int64_t(p.batch) * p.kv_heads * row_tiles * key_tiles;
  const int partials = plan.add_scratch("partials", 4 * tiles * c.dim_split * c.block_m * c.block_n);
  plan.add("large_head_scores", {grid.x, key_tiles, grid.z}, c.threads, c.scores_smem_bytes);
  plan.add("large_head", grid, c.threads, c.smem_bytes).overlaps = c.overlaps;
  for (int i : {0, 1}) {
    attention_args(plan.launch[i], p);
    plan.launch[i].buffer(partials);
  }
  return plan;
}
