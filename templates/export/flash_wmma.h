// flash_wmma: one launch, a block for each tile of rows of each head.

struct Config : Compiled {
  int block_m, threads, smem_bytes;
};

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const Size grid{ceil_div(p.seqlen_q, c.block_m), p.heads, p.batch};
  attention_args(plan.add("flash_wmma", grid, c.threads, c.smem_bytes), p);
  return plan;
}
