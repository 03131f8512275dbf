// merge_kernel.cuh: adds up the results of the splits. Needs the constants of split_kv.cu.j2.

// One packed row per block: grid (packed rows, kv_heads, batch).
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) split_kv_merge(
    Element* __restrict__ o_gmem,  // [batch, heads, seqlen_q, HEAD_DIM]
    int seqlen_q, int kv_heads, int group_heads, int row_blocks, int splits, int64_t o_batch_stride,
    int64_t o_head_stride, int64_t o_row_stride,
    const float4* partial_gmem,  // [batch, kv_heads, row blocks, splits, BLOCK_M, CHUNKS]
    const float2* state_gmem LSE_PARAMETERS VARIANT_PARAMETERS) {  // [batch, kv_heads, row blocks, splits, BLOCK_M]
  using Buffer = MergeBuffer<MERGE_SOURCES, 1, HEAD_DIM>;
  const Terms terms{VARIANT_ARGUMENTS};
  __shared__ __align__(16) unsigned char smem[Buffer::BYTES];
  const int row = blockIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
  if constexpr (VARLEN) {
    const Sequence sequence = sequence_of(terms, seqlen_q, 0);
    seqlen_q = sequence.queries, o_batch_stride = 0;
    o_gmem += sequence.first_query * o_row_stride;
  }
  const PackedRows packed{group_heads, seqlen_q};
  const int64_t tile = (int64_t(batch) * kv_heads + kv_head) * row_blocks + row / BLOCK_M;
  const int64_t first = tile * splits * BLOCK_M + row % BLOCK_M;
  const Buffer buffer{smem};
  if constexpr (DEPENDENT_LAUNCH != DependentLaunch::NONE) grid_dependency_wait();  // for the results of split_kv
  // Not before: a launch of which no thread waits may end before split_kv has.
  if (VARLEN && row >= group_heads * seqlen_q) return;
  const int sources =
      gather_splits<MERGE_THREADS>(buffer, partial_gmem + first * CHUNKS, state_gmem + first, splits, BLOCK_M, 1);
  __syncthreads();  // the sums of all threads are visible
  o_gmem +=
      batch * o_batch_stride + kv_head * packed.heads * o_head_stride + packed.offset(row, o_head_stride, o_row_stride);
  if constexpr (WRITE_LSE) {
    const int head = kv_head * packed.heads + packed.head(row), batch_heads = kv_heads * packed.heads;
    if (threadIdx.x == 0)
      store_log_sum(LSE_ARGUMENTS, buffer.total(sources, 0, 0), terms, head,
                    (VARLEN ? 0 : int64_t(batch) * batch_heads) + head, seqlen_q,
                    sequence_of(terms, seqlen_q, 0).first_query, packed.query(row));
  }
  for (int chunk = threadIdx.x; chunk < CHUNKS; chunk += MERGE_THREADS)
    store_share(o_gmem + chunk * 4, buffer.total(sources, 0, chunk), terms, kv_head * packed.heads + packed.head(row));
}
