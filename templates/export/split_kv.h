// split_kv: keys split over blocks; their results are merged by a second launch, by the last block or in a cluster.

struct Config : Compiled {
  int block_m, splits, warp_keys, threads, merge_threads, smem_bytes, unused_bytes;
  bool by_tensor_map, merge_kernel, merge_last_block, merge_cluster, overlaps;
};

constexpr int SPLIT_GRANULE = 16;  // keys that a split is a multiple of

inline Plan plan(const Problem& p, const Config& c, int) {
  Plan plan{};
  const int64_t group = p.heads / p.kv_heads, packed_rows = group * p.seqlen_q;
  const int64_t blocks = ceil_div(packed_rows, c.block_m), cluster = c.merge_cluster ? c.splits : 1;
  const int64_t keys = ceil_div(ceil_div(p.seqlen_k, c.splits), SPLIT_GRANULE) * SPLIT_GRANULE;
  const int64_t splits = larger(cluster, ceil_div(p.seqlen_k, keys));

  const int64_t tiles = blocks * p.kv_heads * p.batch, rows = tiles * splits * c.block_m;
  const bool merges = splits > 1 && !c.merge_cluster;
  const int64_t unused = c.unused_bytes;
  const int partial = plan.add_scratch("partial", merges ? rows * c.head_dim * 4 : unused);
  const int state = plan.add_scratch("state", merges ? rows * 8 : unused);
  const int arrived = plan.add_scratch("arrived_zeroed", merges && c.merge_last_block ? tiles * 4 : unused, true);

  Launch& first = plan.add("split_kv", {blocks * splits, p.kv_heads, p.batch}, c.threads, c.smem_bytes);
  first.cluster.x = cluster;
  attention_args(first, p);
  if (c.by_tensor_map)
    for (int id : {K, V}) first.args[id] = {Argument::TENSOR_MAP, 0, 0, tile_map(p, c, id, c.warp_keys)};
  for (int64_t n : {group, blocks, splits, keys}) first.int32(n);
  for (int id : {partial, state, arrived}) first.buffer(id);
  if (c.writes_lse) first.buffer(LSE);
  if (splits == 1 || !c.merge_kernel) return plan;

  Launch& merge = plan.add("split_kv_merge", {packed_rows, p.kv_heads, p.batch}, c.merge_threads, 0);
  merge.overlaps = c.overlaps;
  merge.buffer(O);
  for (int64_t n : {int64_t(p.seqlen_q), int64_t(p.kv_heads), group, blocks, splits}) merge.int32(n);
  merge.strides(p.o);
  for (int id : {partial, state}) merge.buffer(id);
  if (c.writes_lse) merge.buffer(LSE);
  return plan;
}
