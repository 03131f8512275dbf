// group_rows.cuh: what a block works on where the query heads that share a K/V head stand below one another as rows:
// ROWS of them, and 1 / SPLIT of head_dim. Grid x counts the tiles of rows, SPLIT blocks each, z the K/V heads of all
// batches.
#include "device/ptx/element.cuh"

template <int ROWS, int SPLIT, class Mask> struct GroupRows {
  int split, kv_head, batch, group;  // group: query heads of the K/V head
  int first_row, all_rows, seqlen_q, seqlen_k;
  typename Mask::Rows mask;

  __device__ __forceinline__ GroupRows(int heads, int kv_heads, int seqlen_q, int seqlen_k)
      : seqlen_q(seqlen_q), seqlen_k(seqlen_k), mask{seqlen_q, seqlen_k} {
    const int z = blockIdx.z;  // divisions, which stand before the first load, only where they are needed
    batch = z < kv_heads ? 0 : z / kv_heads, kv_head = z - batch * kv_heads;
    group = heads == kv_heads ? 1 : heads / kv_heads, all_rows = group * seqlen_q;
    split = blockIdx.x % SPLIT, first_row = blockIdx.x / SPLIT * ROWS;
  }
  __device__ __forceinline__ int head_of(int row) const { return group == 1 ? 0 : row / seqlen_q; }
  __device__ __forceinline__ int query_of(int row) const { return group == 1 ? row : row % seqlen_q; }

  // Keys that a row sees, and that any row of the block sees. Rows past the last see what the last one sees.
  __device__ __forceinline__ int keys_of(int row) const { return mask.keys_of(query_of(min(row, all_rows - 1))); }
  __device__ __forceinline__ int keys_end() const {
    if constexpr (!Mask::ROWS_DIFFER) return seqlen_k;
    const int last_row = min(first_row + ROWS, all_rows) - 1;
    return keys_of(head_of(first_row) == head_of(last_row) ? last_row : seqlen_q - 1);
  }
  // Where a row begins in a tensor at its head 0 of the group; rows past the last are the last one: they can be read
  // and are never stored.
  template <typename T>
  __device__ __forceinline__ T* row_address(T* tensor_gmem, int row, int64_t head_stride, int64_t row_stride) const {
    row = min(first_row + row, all_rows - 1);
    return tensor_gmem + head_of(row) * head_stride + query_of(row) * row_stride;
  }
};
