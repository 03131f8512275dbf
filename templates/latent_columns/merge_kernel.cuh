// merge_kernel.cuh: adds up the results of blocks that share rows. Needs the constants of latent_columns.cu.j2.
#include "device/copy/vector.cuh"
#include "device/merge/split_merge.cuh"
#include "device/ptx/grid_dependency.cuh"

// One query of one head per block: grid (seqlen_q · group_heads, kv_heads, batch).
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    latent_columns_merge(Element* __restrict__ o_gmem,  // [batch, heads, seqlen_q, VALUE_DIM]
                         float* __restrict__ lse_gmem,  // WRITE_LSE: [batch, heads, seqlen_q]
                         const float4* partial_gmem,    // [blocks, 2, BLOCK_M, VALUE_DIM / 4]
                         const float2* state_gmem,      // [blocks, 2, BLOCK_M]
                         const int2* sharers_gmem,      // [batch, kv_heads, tiles of queries, of heads]
                         int kv_heads, int seqlen_q, int group_heads, int64_t o_batch_stride, int64_t o_head_stride,
                         int64_t o_row_stride) {
  constexpr int CHUNKS = VALUE_DIM / 4, IN_FLIGHT = 8;  // loads per thread
  const int query = blockIdx.x / group_heads, group_head = blockIdx.x % group_heads;
  const int kv_head = blockIdx.y, batch = blockIdx.z, head_blocks = (group_heads + HEADS - 1) / HEADS;
  const int query_blocks = (seqlen_q + QUERIES - 1) / QUERIES;
  const int row = query % QUERIES * HEADS + group_head % HEADS;  // of the tile
  const int64_t of_kv_head = int64_t(batch) * kv_heads + kv_head;
  grid_dependency_wait();  // for the results of latent_columns
  const int2 sharers = sharers_gmem[(of_kv_head * query_blocks + query / QUERIES) * head_blocks + group_head / HEADS];
  if (sharers.y == 1) return;
  o_gmem += batch * o_batch_stride + (kv_head * group_heads + group_head) * o_head_stride + query * o_row_stride;
  // Groups of threads take the results in turn; one of them adds up what they found.
  constexpr int GROUPS = MERGE_THREADS / CHUNKS;
  static_assert(GROUPS * CHUNKS <= MERGE_THREADS && GROUPS > 0, "a thread for four columns at least");
  using Buffer = MergeBuffer<(MERGE_THREADS + CHUNKS - 1) / CHUNKS, 1, VALUE_DIM>;  // as families/latent.py has it
  static_assert(Buffer::BYTES == MERGE_SMEM_BYTES, "Python and CUDA disagree");
  extern __shared__ __align__(1024) unsigned char smem[];  // not static: that would count for both kernels
  const Buffer buffer{smem};
  const int chunk = threadIdx.x % CHUNKS, group = threadIdx.x / CHUNKS;
  if (group < GROUPS) {
    RowShare share;
    for (int first = group; first < sharers.y; first += IN_FLIGHT * GROUPS) {
      float2 state[IN_FLIGHT];
      float4 o[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        // The first block has left it as its second result, those behind it as their first.
        const int of = first + j * GROUPS;
        const int64_t at = int64_t(2 * (sharers.x + of) + (of == 0)) * BLOCK_M + row;
        state[j] = make_float2(NO_KEY, 0.f), o[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (of < sharers.y)
          state[j] = load_fresh(state_gmem + at), o[j] = load_fresh(partial_gmem + at * CHUNKS + chunk);
      }
      float highest = state[0].x;
#pragma unroll
      for (int j = 1; j < IN_FLIGHT; ++j) highest = fmaxf(highest, state[j].x);
      share.raise(highest);
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) share.add(o[j], state[j]);
    }
    *reinterpret_cast<float4*>(buffer.place(group, 0, chunk * 4)) = share.o;
    if (chunk == 0) *buffer.state(group, 0) = make_float2(share.shift, share.sum);
  }
  __syncthreads();  // the sums of all groups are visible
  if (group > 0) return;
  const RowShare share = buffer.total(GROUPS, 0, chunk);
  if constexpr (WRITE_LSE) {
    if (chunk == 0)
      lse_gmem[(of_kv_head * group_heads + group_head) * seqlen_q + query] = log_sum(share.shift, share.sum);
  }
  const float inverse = share.inverse();
  const float x[4] = {share.o.x * inverse, share.o.y * inverse, share.o.z * inverse, share.o.w * inverse};
  store_floats<4>(o_gmem + chunk * 4, x);
}
