// scores_kernel.cuh: partial scores of one tile of BLOCK_N keys over one slice of head_dim, for every tile of rows and
// of keys: blockIdx.y is that of keys. Needs the constants of large_head.cu.j2.

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    large_head_scores(const Element* __restrict__ q_gmem,  // [batch, heads, seqlen_q, HEAD_DIM]
                      const Element* __restrict__ k_gmem,  // [batch, kv_heads, seqlen_k, HEAD_DIM]
                      const Element* __restrict__ v_gmem,  // [batch, kv_heads, seqlen_k, HEAD_DIM], not read here
                      Element* __restrict__ o_gmem,        // [batch, heads, seqlen_q, HEAD_DIM], not written here
                      int heads, int kv_heads, int seqlen_q, int seqlen_k, int64_t q_batch_stride,
                      int64_t q_head_stride, int64_t q_row_stride,  // strides in elements; multiples of 8
                      int64_t k_batch_stride, int64_t k_head_stride, int64_t k_row_stride, int64_t v_batch_stride,
                      int64_t v_head_stride, int64_t v_row_stride, int64_t o_batch_stride, int64_t o_head_stride,
                      int64_t o_row_stride, float softmax_scale_log2,
                      float* __restrict__ partials_gmem) {  // see partials_at
  extern __shared__ __align__(16) unsigned char shared_memory[];
  if constexpr (DEPENDENT_LAUNCH) grid_dependency_launch();     // at first it loads V, which no launch writes
  Element* q_smem = reinterpret_cast<Element*>(shared_memory);  // [BLOCK_M, QK_STRIDE]
  Element* k_smem = q_smem + Q_ELEMENTS;                        // [BLOCK_N, QK_STRIDE]
  const BlockRows block(heads, kv_heads, seqlen_q, seqlen_k);
  const int first_key = blockIdx.y * BLOCK_N;
  // No row sees any of these keys, and the second launch reads none of these scores.
  if (first_key >= block.keys_end()) return;
  q_gmem += block.batch * q_batch_stride + block.kv_head * block.group * q_head_stride + block.split * SLICE;
  k_gmem += block.batch * k_batch_stride + block.kv_head * k_head_stride + block.split * SLICE;
  auto q_row_gmem = [&](int row) { return block.row_address(q_gmem, row, q_head_stride, q_row_stride); };
  auto k_row_gmem = [&](int key) { return k_gmem + min(first_key + key, seqlen_k - 1) * k_row_stride; };

  if constexpr (Q_IN_SHARED) copy_slice<BLOCK_M, CHUNKS, QK_STRIDE, THREADS>(q_smem, q_row_gmem);
  if constexpr (K_IN_SHARED) copy_slice<BLOCK_N, CHUNKS, QK_STRIDE, THREADS>(k_smem, k_row_gmem);
  if constexpr (SCORES_ELEMENTS > 0) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // Q and K are visible to all warps
  }
  float* partial_gmem = partials_gmem + partials_at(blockIdx.y, seqlen_k) + block.split * SCORES;
  auto q_row = [&](int row) {
    if constexpr (Q_IN_SHARED) return q_smem + row * QK_STRIDE;
    else return q_row_gmem(row);
  };
  auto k_row = [&](int key) {
    if constexpr (K_IN_SHARED) return k_smem + key * QK_STRIDE;
    else return k_row_gmem(key);
  };
  ScoreTiles::multiply<Element, BLOCK_N>(partial_gmem, q_row, k_row,
                                         reinterpret_cast<float4*>(q_smem + SCORES_ELEMENTS), []() {});
}
