// mma_values.cuh: O = P V of the pipeline by mma.sync. Needs the constants of three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/copy/swizzle.cuh"
#include "three_kernel/gather_tile.cuh"
#include "device/mma/flash_fragments.cuh"
#include "device/copy/flash_output.cuh"
#include "three_kernel/parts.cuh"
#include "three_kernel/tiles.cuh"

constexpr int KEYS_WRITTEN_STEP = 8;  // P V reads chunks of eight probabilities

namespace values {  // O = P V / sums
constexpr int THREADS = 32 * PV_WARPS;
constexpr int ROW_TILES = PV_BLOCK_M / PV_WARPS / 16;
using LayoutP = TileLayout<PV_BLOCK_K / 8, true>;
using LayoutV = TileLayout<2 * DIM_STEPS, true>;
constexpr int P_BYTES = PV_BLOCK_M * LayoutP::ROW_BYTES, STAGE_BYTES = P_BYTES + PV_BLOCK_K * LayoutV::ROW_BYTES;
constexpr int O_BYTES = PV_BLOCK_M * LayoutV::ROW_BYTES;  // takes the place of the ring
static_assert((PV_STAGES * STAGE_BYTES > O_BYTES ? PV_STAGES * STAGE_BYTES : O_BYTES) == VALUES_SMEM_BYTES,
              "Python and CUDA disagree");
static_assert(PV_BLOCK_M == 16 * ROW_TILES * PV_WARPS, "whole mma tiles in every warp");

// 2^(S - shift) of two keys, of which the row sees the first `visible`.
template <typename Pair> __device__ __forceinline__ uint32_t probabilities(uint32_t pair, float shift, int visible) {
  float even, odd;
  unpack2(pair, Pair{}, even, odd);
  return pack2<Element>(visible > 0 ? exp2_approx(even - shift) : 0.f, visible > 1 ? exp2_approx(odd - shift) : 0.f);
}
}  // namespace values

extern "C" __global__ void __launch_bounds__(values::THREADS) three_kernel_values(
    const Element* __restrict__ p_gmem,  // [batch, heads, seqlen_q, score_stride]: P, or S with EXPONENTS_LATE
    float2* tiles_gmem,                  // [batch, heads, references, seqlen_q]: factors and sums; with TILE_SOFTMAX
    float2* rows_gmem,                   // [batch, heads, seqlen_q]: shift and sum
    const Element* __restrict__ v_gmem,  // [batch, kv_heads, seqlen_k, HEAD_DIM]
    Element* __restrict__ o_gmem,        // [batch, heads, seqlen_q, HEAD_DIM]
    int heads, int kv_heads, int seqlen_q, int seqlen_k, int score_stride, int64_t v_batch_stride,
    int64_t v_head_stride, int64_t v_row_stride, int64_t o_batch_stride, int64_t o_head_stride, int64_t o_row_stride) {
  using namespace values;
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t smem_address = shared_address(smem);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block_row = (Mask::LAST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * PV_BLOCK_M,
            warp_row = block_row + warp * ROW_TILES * 16;
  const int batch_head = values_batch_head(), head = batch_head % heads, batch = batch_head / heads,
            kv_head = head / (heads / kv_heads);
  const int keys = keys_read(block_row, PV_BLOCK_M, seqlen_q, seqlen_k), tiles = (keys + PV_BLOCK_K - 1) / PV_BLOCK_K;
  const int64_t first_row = int64_t(batch_head) * seqlen_q + block_row;
  p_gmem += first_row * score_stride;
  v_gmem += batch * v_batch_stride + kv_head * v_head_stride;
  o_gmem += batch * o_batch_stride + head * o_head_stride;

  auto same_row = [](int row) { return row; };
  auto load_p = [&](int tile) {
    const int key = tile * PV_BLOCK_K;
    gather_tile<LayoutP, PV_BLOCK_M, 0, PV_BLOCK_K / 8, THREADS>(smem_address + tile % PV_STAGES * STAGE_BYTES,
                                                                 p_gmem + key, score_stride, seqlen_q - block_row,
                                                                 (keys - key + 7) / 8, same_row);
  };
  auto load_v = [&](int tile) {
    const int key = tile * PV_BLOCK_K;
    gather_tile<LayoutV, PV_BLOCK_K, 0, DIM_TILES, THREADS>(smem_address + tile % PV_STAGES * STAGE_BYTES + P_BYTES,
                                                            v_gmem + key * v_row_stride, v_row_stride, seqlen_k - key,
                                                            DIM_TILES, same_row);
  };
#pragma unroll
  for (int tile = 0; tile < PV_STAGES - 1; ++tile) {
    if (tile < tiles) load_v(tile);
  }
  wait_for_kernels_before();  // none of them writes V
#pragma unroll
  for (int tile = 0; tile < PV_STAGES - 1; ++tile) {  // the first group has V of all these tiles
    if (tile < tiles) load_p(tile);
    cp_async_commit();
  }
  if constexpr (TILE_SOFTMAX) tiles_gmem += tile_row(batch_head, 0, 0, seqlen_q, seqlen_k);

  RowState<ROW_TILES, DIM_TILES> state;
  state.clear();
  float factor[ROW_TILES][2];  // of the next reference, on its way while the one before is multiplied
  RowMerge merge[ROW_TILES];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    const int row = warp_row + m * 16 + lane / 4;
    factor[m][0] = factor[m][1] = 0.f;
    if constexpr (MERGE_LATE) {
      merge[m].tiles_gmem = tiles_gmem + row, merge[m].references = (keys + REFERENCE_KEYS - 1) / REFERENCE_KEYS;
      merge[m].seqlen_q = seqlen_q, merge[m].valid_rows = seqlen_q - row;
      merge[m].start(lane);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + half * 8 < seqlen_q) {
          const float2 shift_and_sum = rows_gmem[first_row - block_row + row + half * 8];
          state.shift[m][half] = shift_and_sum.x, state.sum[m][2 * half] = shift_and_sum.y;
        }
      }
    }
  }
  // O to be relative to the next reference.
  auto next_reference = [&](int reference) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (MERGE_LATE) factor[m][half] = merge[m].step(half);
#pragma unroll
        for (int n = 0; n < DIM_TILES; ++n) {
          state.o[m][n][2 * half] *= factor[m][half], state.o[m][n][2 * half + 1] *= factor[m][half];
        }
        const int row = warp_row + m * 16 + half * 8 + lane / 4;
        if constexpr (MERGE_LATE) {
          merge[m].next[half] = merge[m].load(reference + 1, half);
        } else if (row < seqlen_q && (reference + 1) * REFERENCE_KEYS < keys) {
          factor[m][half] = tiles_gmem[int64_t(reference + 1) * seqlen_q + row].x;
        }
      }
  };
  const uint32_t p_smem = smem_address + warp * ROW_TILES * 16 * LayoutP::ROW_BYTES + LayoutP::rows_first(lane);
  const uint32_t v_smem = smem_address + P_BYTES + LayoutV::rows_first(lane);
  for (int tile = 0; tile < tiles; ++tile) {
    if (TILE_SOFTMAX && tile * PV_BLOCK_K % REFERENCE_KEYS == 0) next_reference(tile * PV_BLOCK_K / REFERENCE_KEYS);
    cp_async_wait<PV_STAGES - 2>();
    __syncthreads();  // the tile is visible to all warps, and none still reads the one before
    if (tile + PV_STAGES - 1 < tiles) load_p(tile + PV_STAGES - 1), load_v(tile + PV_STAGES - 1);
    cp_async_commit();  // an empty group past the last tile keeps the count
    const uint32_t stage = tile % PV_STAGES * STAGE_BYTES;
    // Of the keys from this lane's first on; row g of row tile 0 is the first row.
    const auto keys = Mask(seqlen_q, seqlen_k).keys_from(warp_row + lane / 4, tile * PV_BLOCK_K + lane % 4 * 2);
#pragma unroll
    for (int k = 0; k < PV_BLOCK_K / 16; ++k) {
      uint32_t p[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        ldmatrix_x4(p[m], LayoutP::block_address(p_smem + stage, m, k));
        if constexpr (EXPONENTS_LATE) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // rows g, g + 8 of keys 0-7, then of keys 8-15
            const int visible = keys.of(m * 16 + i % 2 * 8);
            p[m][i] = probabilities<Score>(p[m][i], state.shift[m][i % 2], visible - (k * 16 + i / 2 * 8));
          }
        }
      }
      add_product<Element, LayoutV, 1>(state.o, p, v_smem + stage, k);
    }
  }
  if constexpr (MERGE_LATE) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) state.sum[m][0] = merge[m].sum[0], state.sum[m][2] = merge[m].sum[1];
  }
  __syncthreads();  // no warp still reads the ring, which O overwrites
  store_output<LayoutV, true, true>(state, NoSink{}, 0, smem + warp * ROW_TILES * 16 * LayoutV::ROW_BYTES,
                                    o_gmem + warp_row * o_row_stride, o_row_stride, seqlen_q - warp_row, lane);
}
