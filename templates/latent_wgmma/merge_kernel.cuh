// merge_kernel.cuh: adds up the results of blocks that share keys. Needs the constants of latent_wgmma.cu.j2.
#include "device/copy/vector.cuh"
#include "device/merge/split_merge.cuh"
#include "device/ptx/grid_dependency.cuh"

constexpr int CHUNKS = VALUE_DIM / 4;  // of four columns, of a row of O
// One query of one head per block: grid (seqlen_q · group_heads, kv_heads, batch).
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    latent_wgmma_merge(Element* __restrict__ o_gmem,  // [batch, heads, seqlen_q, VALUE_DIM]
                       float* __restrict__ lse_gmem,  // WRITE_LSE: [batch, heads, seqlen_q]
                       const float4* partial_gmem,    // [batch, kv_heads, row blocks, splits, 64, CHUNKS]
                       const float2* state_gmem,  // [batch, kv_heads, row blocks, splits, 64]; SEQUSED: filled splits
                       int kv_heads, int seqlen_q, int group_heads, int splits, int64_t o_batch_stride,
                       int64_t o_head_stride, int64_t o_row_stride) {
  using Buffer = MergeBuffer<(MERGE_THREADS + CHUNKS - 1) / CHUNKS, 1, VALUE_DIM>;
  static_assert(Buffer::BYTES == MERGE_SMEM_BYTES, "Python and CUDA disagree");
  extern __shared__ __align__(1024) unsigned char smem[];  // not static: that would count for both kernels
  const int query = blockIdx.x / group_heads, group_head = blockIdx.x % group_heads;
  const int kv_head = blockIdx.y, batch = blockIdx.z, head_blocks = (group_heads + 63) / 64;
  const int64_t tile =
      (int64_t(batch) * kv_heads + kv_head) * head_blocks * seqlen_q + query * head_blocks + group_head / 64;
  const int64_t first = tile * splits * 64 + group_head % 64;
  const Buffer buffer{smem};
  if constexpr (DEPENDENT_LAUNCH) grid_dependency_wait();  // for the results of latent_wgmma
  int filled = splits;
  if constexpr (SEQUSED) {
    const int64_t tiles = int64_t(gridDim.z) * kv_heads * head_blocks * seqlen_q;
    filled = *(const volatile int*)(filled_splits(const_cast<float2*>(state_gmem), tiles * splits) + tile);
  }
  const int sources =
      gather_splits<MERGE_THREADS>(buffer, partial_gmem + first * CHUNKS, state_gmem + first, filled, 64, 1);
  __syncthreads();  // the sums of all threads are visible
  o_gmem += batch * o_batch_stride + (kv_head * group_heads + group_head) * o_head_stride + query * o_row_stride;
  for (int chunk = threadIdx.x; chunk < CHUNKS; chunk += MERGE_THREADS) {
    const RowShare share = buffer.total(sources, 0, chunk);
    if constexpr (WRITE_LSE) {
      const int64_t head = (int64_t(batch) * kv_heads + kv_head) * group_heads + group_head;  // of all batches
      if (chunk == 0) lse_gmem[head * seqlen_q + query] = log_sum(share.shift, share.sum);
    }
    const float inverse = share.inverse();
    const float x[4] = {share.o.x * inverse, share.o.y * inverse, share.o.z * inverse, share.o.w * inverse};
    store_floats<4>(o_gmem + chunk * 4, x);
  }
}
