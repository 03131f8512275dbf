// softmax_tiles.cuh: what is left of the softmax where Q Kᵀ has exponentiated each tile. Needs the constants of
// three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "three_kernel/parts.cuh"
#include "three_kernel/tiles.cuh"

extern "C" __global__ void __launch_bounds__(ROWS_PER_BLOCK)
    three_kernel_softmax(float2* tiles_gmem,                      // [batch · heads, references, seqlen_q]
                         float2* rows_gmem,                       // [rows]
                         int rows, int seqlen_q, int seqlen_k) {  // rows = batch · heads · seqlen_q
  next_may_begin<false>();
  const int row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.x;
  if (row >= rows) return;
  const int query = row % seqlen_q;
  tiles_gmem += tile_row(row / seqlen_q, 0, query, seqlen_q, seqlen_k);
  wait_for_kernels_before();
  rows_gmem[row] = merge_tiles(tiles_gmem, query, seqlen_q, seqlen_k);
}
