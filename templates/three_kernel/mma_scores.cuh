// mma_scores.cuh: S = Q Kᵀ of the pipeline by mma.sync. Needs the constants of three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/copy/vector.cuh"
#include "device/copy/swizzle.cuh"
#include "three_kernel/gather_tile.cuh"
#include "three_kernel/parts.cuh"
#include "three_kernel/tiles.cuh"

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
