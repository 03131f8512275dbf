// flash_mma: one launch, a block for each tile of rows of each head.

struct Config : Compiled {
  int block_m, threads, smem_bytes;
  bool heads_fastest;
};

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const int64_t rows = ceil_div(p.seqlen_q, c.block_m);
  const Size by_heads{p.heads, p.batch, rows}, by_rows{rows, p.heads, p.batch};
  Launch& launch = plan.add("flash_mma", c.heads_fastest ? by_heads : by_rows, c.threads, c.smem_bytes);
  attention_args(launch, p);
  if (c.writes_lse) launch.buffer(LSE);
  return plan;
}
