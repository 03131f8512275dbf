// flash_scalar: one launch, a block for each tile of rows of each head, in one dimension.

struct Config : Compiled {
  int block_m, threads, smem_bytes;
};

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const int64_t blocks = ceil_div(p.seqlen_q, c.block_m) * p.heads * p.batch;
  attention_args(plan.add("flash_scalar", {blocks, 1, 1}, c.threads, c.smem_bytes), p);
  return plan;
}
