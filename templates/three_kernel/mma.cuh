// mma.cuh: both products of the pipeline by mma.sync. Needs the constants of three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/copy/vector.cuh"
#include "device/copy/swizzle.cuh"
#include "device/copy/gather_tile.cuh"
#include "device/mma/flash_fragments.cuh"
#include "device/copy/flash_output.cuh"
#include "three_kernel/parts.cuh"
#include "three_kernel/tiles.cuh"

constexpr int KEYS_WRITTEN_STEP = 8;  // P V reads chunks of eight probabilities

namespace scores {  // S = Q Kᵀ · scale
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int ROW_TILES = BLOCK_M / WARPS_M / 16;  // m16 tiles per warp
constexpr int KEY_TILES = BLOCK_N / WARPS_N / 8;   // n8 tiles per warp
constexpr int CHUNKS = 2 * DIM_STEPS;              // of 16 bytes per row, the last one zeros for odd DIM_TILES
// That are copied, and multiplied, before the others.
constexpr int FIRST_CHUNKS = BLOCK_K / 8 < CHUNKS ? BLOCK_K / 8 : CHUNKS;
using Layout = TileLayout<CHUNKS, true>;
constexpr int K_OFFSET = BLOCK_M * Layout::ROW_BYTES;
static_assert(K_OFFSET + BLOCK_N * Layout::ROW_BYTES == SCORES_SMEM_BYTES, "Python and CUDA disagree");
static_assert(BLOCK_M == 16 * ROW_TILES * WARPS_M && BLOCK_N == 8 * KEY_TILES * WARPS_N && KEY_TILES % 4 == 0,
              "whole groups of keys");

// Keys are permuted in groups of 32, so that the four n8 tiles of a group leave a lane eight neighbouring keys: column
// c of tile n is key 8 (c / 2) + 2n + c % 2.
__device__ __forceinline__ int key_of_row(int row) {
  return row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
}

template <int FIRST, int LAST>  // k16 steps of head_dim
__device__ __forceinline__ void multiply(float (&s)[ROW_TILES][KEY_TILES][4], uint32_t q_smem, uint32_t k_smem) {
#pragma unroll
  for (int d = FIRST; d < LAST; ++d) {
    uint32_t q[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) ldmatrix_x4(q[m], Layout::block_address(q_smem, m, d));
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2) {
      uint32_t k[4];  // dims 0-7, 8-15 of tile n, then of tile n + 1
      ldmatrix_x4(k, Layout::block_address(k_smem, n / 2, d));
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        mma_m16n8k16<Element>(s[m][n], q[m], k[0], k[1]);
        mma_m16n8k16<Element>(s[m][n + 1], q[m], k[2], k[3]);
      }
    }
  }
}
}  // namespace scores

extern "C" __global__ void __launch_bounds__(scores::THREADS) three_kernel_scores(
    const Element* __restrict__ q_gmem,  // [batch, heads, seqlen_q, HEAD_DIM]
    const Element* __restrict__ k_gmem,  // [batch, kv_heads, seqlen_k, HEAD_DIM]
    Score* __restrict__ s_gmem,          // [batch, heads, seqlen_q, score_stride]; P with TILE_SOFTMAX
    float2* __restrict__ tiles_gmem,     // [batch, heads, references, seqlen_q]; written with TILE_SOFTMAX
    int heads, int kv_heads, int seqlen_q, int seqlen_k, int score_stride, int64_t q_batch_stride,
    int64_t q_head_stride, int64_t q_row_stride, int64_t k_batch_stride, int64_t k_head_stride, int64_t k_row_stride,
    float softmax_scale_log2) {  // 1 / sqrt(HEAD_DIM) · log2 e
  using namespace scores;
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t smem_address = shared_address(smem);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warp = warp / WARPS_N, key_warp = warp % WARPS_N;
  const int block_row = blockIdx.y * BLOCK_M, block_key = blockIdx.x * BLOCK_N;
  const int head = blockIdx.z % heads, batch = blockIdx.z / heads, kv_head = head / (heads / kv_heads);
  if (block_key >= keys_read(block_row, BLOCK_M, seqlen_q, seqlen_k)) return;  // the mask hides the whole tile
  next_may_begin<false>();
  q_gmem += batch * q_batch_stride + head * q_head_stride + block_row * q_row_stride;
  k_gmem += batch * k_batch_stride + kv_head * k_head_stride + block_key * k_row_stride;

  auto load = [&](auto first, auto last) {
    constexpr int FIRST = decltype(first)::value, LAST = decltype(last)::value;
    gather_tile<Layout, BLOCK_M, FIRST, LAST, THREADS>(smem_address, q_gmem, q_row_stride, seqlen_q - block_row,
                                                       DIM_TILES, [](int row) { return row; });
    gather_tile<Layout, BLOCK_N, FIRST, LAST, THREADS>(smem_address + K_OFFSET, k_gmem, k_row_stride,
                                                       seqlen_k - block_key, DIM_TILES, key_of_row);
    cp_async_commit();
  };
  load(Constant<0>{}, Constant<FIRST_CHUNKS>{});
  if constexpr (FIRST_CHUNKS < CHUNKS) load(Constant<FIRST_CHUNKS>{}, Constant<CHUNKS>{});

  float s[ROW_TILES][KEY_TILES][4];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
  const uint32_t q_smem = smem_address + row_warp * ROW_TILES * 16 * Layout::ROW_BYTES + Layout::rows_first(lane);
  const uint32_t k_smem =
      smem_address + K_OFFSET + key_warp * KEY_TILES * 8 * Layout::ROW_BYTES + Layout::chunks_first(lane);
  cp_async_wait<(FIRST_CHUNKS < CHUNKS)>();
  __syncthreads();  // the first columns of Q and K are visible to all warps
  multiply<0, FIRST_CHUNKS / 2>(s, q_smem, k_smem);
  if constexpr (FIRST_CHUNKS < CHUNKS) {
    cp_async_wait<0>();
    __syncthreads();  // and the others
    multiply<FIRST_CHUNKS / 2, DIM_STEPS>(s, q_smem, k_smem);
  }
  next_may_begin<true>();

  s_gmem += int64_t(blockIdx.z) * seqlen_q * score_stride;
  if constexpr (TILE_SOFTMAX) {
    const int first_key = block_key + key_warp * REFERENCE_KEYS;
    const Mask mask(seqlen_q, seqlen_k);
    const int all_keys = seqlen_k - first_key - lane % 4 * 8;
    // A whole warp of keys past the last one has no reference.
    const int valid_rows = first_key < seqlen_k ? seqlen_q - block_row - row_warp * ROW_TILES * 16 - lane / 4 : 0;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      const int row = block_row + (row_warp * ROW_TILES + m) * 16 + lane / 4;
      const Mask::Keys keys{mask.keys_from(row, first_key).after(lane % 4 * 8).first_row, all_keys};
      const int visible[2] = {keys.of(0), keys.of(8)};
      float2* row_gmem = tiles_gmem + tile_row(blockIdx.z, first_key / REFERENCE_KEYS, row, seqlen_q, seqlen_k);
      tile_softmax(
          reinterpret_cast<float(&)[4 * KEY_TILES]>(s[m]), softmax_scale_log2, visible,
          [](int n, int e) { return n / 4 * 32 + n % 4 * 2 + e; }, row_gmem, valid_rows - m * 16, lane);
    }
  }
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_row + (row_warp * ROW_TILES + m) * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < KEY_TILES; n += 4) {
        const int key = block_key + (key_warp * KEY_TILES + n) * 8 + lane % 4 * 8;
        if (row >= seqlen_q || key >= score_stride) continue;
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          eight[i] = s[m][n + i / 2][2 * half + i % 2] * (TILE_SOFTMAX ? 1.f : softmax_scale_log2);
        if constexpr (TILE_SOFTMAX) store_floats(s_gmem + int64_t(row) * score_stride + key, eight);
        else store_scores(s_gmem + int64_t(row) * score_stride + key, eight);
      }
    }
}

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

// O += P V over the 16 keys of step k.
__device__ __forceinline__ void multiply(RowState<ROW_TILES, DIM_TILES>& state, const uint32_t (&p)[ROW_TILES][4],
                                         uint32_t v_smem, int k) {  // [PV_BLOCK_K, HEAD_DIM], rows_first
#pragma unroll
  for (int d = 0; d < DIM_TILES / 2; ++d) {
    uint32_t v[4];  // transposed: keys 0-7, 8-15 of dims 0-7, then of dims 8-15
    ldmatrix_x4_trans(v, LayoutV::block_address(v_smem, k, d));
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      mma_m16n8k16<Element>(state.o[m][2 * d], p[m], v[0], v[1]);
      mma_m16n8k16<Element>(state.o[m][2 * d + 1], p[m], v[2], v[3]);
    }
  }
  if constexpr (DIM_TILES % 2 != 0) {
    uint32_t v[2];
    ldmatrix_x2_trans(v, LayoutV::block_address(v_smem, k, DIM_TILES / 2));
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) mma_m16n8k16<Element>(state.o[m][DIM_TILES - 1], p[m], v[0], v[1]);
  }
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
      multiply(state, p, v_smem + stage, k);
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
