// large_head_mma: one launch, a block for each slice of columns of each tile of rows, in one dimension.

struct Config : Compiled {
  int block_m, dv_split, threads, smem_bytes;
  bool in_cluster;
};

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const int64_t blocks = ceil_div(p.seqlen_q, c.block_m) * p.heads * p.batch * c.dv_split;
  Launch& launch = plan.add("large_head_mma", {blocks, 1, 1}, c.threads, c.smem_bytes);
  launch.cluster.x = c.in_cluster ? c.dv_split : 1;
  attention_args(launch, p);
  return plan;
}
