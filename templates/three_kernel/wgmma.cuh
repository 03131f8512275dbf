// wgmma.cuh: both products of the pipeline by wgmma, tiles by tensor copies (sm_90a). Needs the constants of
// three_kernel.cu.j2. One thread of a block issues its copies; each warpgroup multiplies 64 rows.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/warp.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/copy/vector.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/copy/wgmma_output.cuh"
#include "three_kernel/parts.cuh"
#include "three_kernel/tiles.cuh"

// Tensor copies bring whole steps of P: the softmax ends it with zeros up to there.
constexpr int KEYS_WRITTEN_STEP = PV_BLOCK_K;
using Tiles = TensorTile<HEAD_DIM>;
constexpr int SCORE_CHUNK_BYTES = 64 * 128;  // 64 rows of 64 scores or probabilities

namespace scores {  // S = Q Kᵀ · scale
constexpr int WARPGROUPS = BLOCK_M / 64, THREADS = 128 * WARPGROUPS;
constexpr int K_OFFSET = WARPGROUPS * Tiles::bytes(64);
constexpr int K_STAGES = TILES_A_BLOCK > 1 ? 2 : 1, K_BYTES = Tiles::bytes(BLOCK_N);
constexpr int TILES_BYTES = K_OFFSET + K_STAGES * K_BYTES, S_BYTES = WARPGROUPS * (BLOCK_N / 64) * SCORE_CHUNK_BYTES;
constexpr int S_OFFSET = TILES_A_BLOCK > 1 ? TILES_BYTES : 0;  // S of the only tile takes the place of Q and K
// Of Q, and of each stage of K.
constexpr int BARRIERS = S_OFFSET + S_BYTES > TILES_BYTES ? S_OFFSET + S_BYTES : TILES_BYTES;
static_assert(BARRIERS + 8 * (1 + K_STAGES) == SCORES_SMEM_BYTES, "Python and CUDA disagree");
}  // namespace scores

extern "C" __global__ void __launch_bounds__(scores::THREADS) three_kernel_scores(
    const __grid_constant__ TensorMap q_map,  // [batch, heads, seqlen_q, HEAD_DIM], boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // [batch, kv_heads, seqlen_k, HEAD_DIM], boxes of BLOCK_N rows
    const __grid_constant__ TensorMap s_map,  // [batch, heads, seqlen_q, score_stride], boxes of 64 × 64; S or P
    float2* __restrict__ tiles_gmem,          // [batch, heads, references, seqlen_q]; written with TILE_SOFTMAX
    int heads, int kv_heads, int seqlen_q, int seqlen_k, float softmax_scale_log2) {
  using namespace scores;
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_address = shared_address(smem);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  const int block_row = blockIdx.y * BLOCK_M, first_tile = blockIdx.x * TILES_A_BLOCK;
  const int head = blockIdx.z % heads, batch = blockIdx.z / heads, kv_head = head / (heads / kv_heads);
  // The mask hides the others.
  const int all_tiles = (keys_read(block_row, BLOCK_M, seqlen_q, seqlen_k) + BLOCK_N - 1) / BLOCK_N;
  const int tiles = min(TILES_A_BLOCK, all_tiles - first_tile);
  if (tiles <= 0) return;
  next_may_begin<false>();

  const uint32_t q_barrier = smem_address + BARRIERS, k_barriers = q_barrier + 8;
  auto load_k = [&](int tile) {  // by one thread
    const int stage = tile % K_STAGES, key = (first_tile + tile) * BLOCK_N;
    Tiles::load<BLOCK_N>(smem_address + K_OFFSET + stage * K_BYTES, k_map, k_barriers + 8 * stage, key, kv_head, batch);
  };
  if (threadIdx.x == 0) {
    mbarrier_init(q_barrier, WARPGROUPS);  // one arrival per copy
    for (int i = 0; i < K_STAGES; ++i) mbarrier_init(k_barriers + 8 * i, 1);
    mbarrier_init_fence();
    for (int i = 0; i < WARPGROUPS; ++i) {
      Tiles::load<64>(smem_address + i * Tiles::bytes(64), q_map, q_barrier, block_row + i * 64, head, batch);
    }
#pragma unroll
    for (int tile = 0; tile < K_STAGES; ++tile) {
      if (tile < tiles) load_k(tile);
    }
  }
  __syncthreads();  // the barriers of Q and K are initialised
  mbarrier_wait(q_barrier, 0);
  const uint64_t q_descriptor = matrix_descriptor(smem_address + warpgroup * Tiles::bytes(64), 0);
  const uint32_t s_smem = smem_address + S_OFFSET + warpgroup * (BLOCK_N / 64) * SCORE_CHUNK_BYTES;
  for (int tile = 0; tile < tiles; ++tile) {
    const int block_key = (first_tile + tile) * BLOCK_N;
    const uint64_t k_descriptor = matrix_descriptor(smem_address + K_OFFSET + tile % K_STAGES * K_BYTES, 0);
    mbarrier_wait(k_barriers + 8 * (tile % K_STAGES), tile / K_STAGES % 2);
    float s[BLOCK_N / 2];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tiles::DIM_STEPS; ++step) {
      const int q_offset = Tiles::step_offset(step, 64), k_offset = Tiles::step_offset(step, BLOCK_N);
      wgmma_qk(s, q_descriptor + descriptor_step(q_offset), k_descriptor + descriptor_step(k_offset), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(s);
    if (tile + 1 == tiles) next_may_begin<true>();
    if constexpr (TILE_SOFTMAX) {
      const int row = block_row + warp * 16 + lane / 4, all_keys = seqlen_k - block_key - lane % 4 * 2;
      const int row_keys = Mask(seqlen_q, seqlen_k).keys_from(row, block_key).after(lane % 4 * 2).first_row;
      const Mask::Keys keys{row_keys, all_keys};
      const int visible[2] = {keys.of(0), keys.of(8)};
      float2* row_gmem = tiles_gmem + tile_row(blockIdx.z, first_tile + tile, row, seqlen_q, seqlen_k);
      tile_softmax(
          s, softmax_scale_log2, visible, [](int n, int e) { return n * 8 + e; }, row_gmem, seqlen_q - row, lane);
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = bounded_score<Score>(s[i] * softmax_scale_log2);
    }
    if (TILES_A_BLOCK > 1 && threadIdx.x % 128 == 0) tma_store_wait_read();
    __syncthreads();  // no warpgroup still reads this K, or Q if S overwrites it; no copy still reads S
    if (threadIdx.x == 0 && tile + K_STAGES < tiles) load_k(tile + K_STAGES);
    __syncwarp();
    const float ones[2] = {1.f, 1.f};
    output_to_shared<Score>(s, ones, s_smem, warp % 4, lane);
    fence_proxy_async();
    __syncthreads();  // all rows of the tile are written
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 64; ++i) {
        tma_store_4d(s_map, s_smem + i * SCORE_CHUNK_BYTES, block_key + i * 64, block_row + warpgroup * 64, head,
                     batch);
      }
      tma_store_commit();
    }
    __syncwarp();
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read();  // shared memory must live until it is read
}

namespace values {  // O = P V / sums
constexpr int WARPGROUPS = PV_BLOCK_M / 64, THREADS = 128 * WARPGROUPS;
constexpr int P_TILE_BYTES = PV_BLOCK_K / 64 * SCORE_CHUNK_BYTES;  // of one warpgroup
constexpr int V_OFFSET = WARPGROUPS * P_TILE_BYTES, STAGE_BYTES = V_OFFSET + Tiles::bytes(PV_BLOCK_K);
constexpr int RING_BYTES = PV_STAGES * STAGE_BYTES,
              O_BYTES = WARPGROUPS * Tiles::bytes(64);  // O takes the place of the ring
constexpr int BARRIERS = RING_BYTES > O_BYTES ? RING_BYTES : O_BYTES;
static_assert(BARRIERS + 8 * PV_STAGES == VALUES_SMEM_BYTES, "Python and CUDA disagree");
}  // namespace values

extern "C" __global__ void __launch_bounds__(values::THREADS) three_kernel_values(
    const __grid_constant__ TensorMap p_map,  // [batch, heads, seqlen_q, seqlen_k], boxes of 64 × 64
    const __grid_constant__ TensorMap v_map,  // [batch, kv_heads, seqlen_k, HEAD_DIM], boxes of PV_BLOCK_K rows
    float2* tiles_gmem,                       // [batch, heads, references, seqlen_q], if TILE_SOFTMAX: factors, sums
    float2* rows_gmem,                        // [batch, heads, seqlen_q]: shift and sum
    Element* __restrict__ o_gmem,             // [batch, heads, seqlen_q, HEAD_DIM]
    int heads, int kv_heads, int seqlen_q, int seqlen_k, int64_t o_batch_stride, int64_t o_head_stride,
    int64_t o_row_stride) {
  using namespace values;
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_address = shared_address(smem);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  const int block_row = (Mask::LAST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * PV_BLOCK_M;
  const int batch_head = values_batch_head(), head = batch_head % heads, batch = batch_head / heads,
            kv_head = head / (heads / kv_heads);
  const int keys = keys_read(block_row, PV_BLOCK_M, seqlen_q, seqlen_k), tiles = (keys + PV_BLOCK_K - 1) / PV_BLOCK_K;

  auto load_p = [&](int tile) {  // by one thread, as is load_v
    const int stage = tile % PV_STAGES;
    const uint32_t stage_smem = smem_address + stage * STAGE_BYTES, barrier_smem = smem_address + BARRIERS + 8 * stage;
    mbarrier_arrive_expect_tx(barrier_smem, V_OFFSET);
#pragma unroll
    for (int i = 0; i < V_OFFSET / SCORE_CHUNK_BYTES; ++i) {
      const int key = tile * PV_BLOCK_K + i % (PV_BLOCK_K / 64) * 64, row = block_row + i / (PV_BLOCK_K / 64) * 64;
      tma_load_4d(stage_smem + i * SCORE_CHUNK_BYTES, p_map, barrier_smem, key, row, head, batch);
    }
  };
  auto load_v = [&](int tile) {
    const int stage = tile % PV_STAGES;
    Tiles::load<PV_BLOCK_K>(smem_address + stage * STAGE_BYTES + V_OFFSET, v_map, smem_address + BARRIERS + 8 * stage,
                            tile * PV_BLOCK_K, kv_head, batch);
  };
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p_map);
    for (int i = 0; i < PV_STAGES; ++i) mbarrier_init(smem_address + BARRIERS + 8 * i, 2);  // arrivals for P and for V
    mbarrier_init_fence();
    for (int tile = 0; tile < min(PV_STAGES, tiles); ++tile) load_v(tile);
  }
  wait_for_kernels_before();  // none of them writes V
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < min(PV_STAGES, tiles); ++tile) load_p(tile);
  }
  rows_gmem += int64_t(batch_head) * seqlen_q;
  if constexpr (TILE_SOFTMAX) tiles_gmem += tile_row(batch_head, 0, 0, seqlen_q, seqlen_k);
  float o[HEAD_DIM / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = 0.f;
  const int warp_row = block_row + warp * 16, row = warp_row + lane / 4;
  float sum[2] = {0.f, 0.f}, factor[2] = {0.f, 0.f};  // of the next reference, on its way while P V goes on
  RowMerge merge{tiles_gmem + row, (keys + REFERENCE_KEYS - 1) / REFERENCE_KEYS, seqlen_q, seqlen_q - row};
  if constexpr (MERGE_LATE) {
    merge.start(lane);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 < seqlen_q) sum[half] = rows_gmem[row + half * 8].y;
    }
  }
  // O to be relative to the next reference.
  auto next_reference = [&](int reference) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (MERGE_LATE) factor[half] = merge.step(half);
#pragma unroll
      for (int i = 2 * half; i < HEAD_DIM / 2; i += 4) o[i] *= factor[half], o[i + 1] *= factor[half];
      if constexpr (MERGE_LATE) {
        merge.next[half] = merge.load(reference + 1, half);
      } else if (row + half * 8 < seqlen_q && (reference + 1) * REFERENCE_KEYS < keys) {
        factor[half] = tiles_gmem[int64_t(reference + 1) * seqlen_q + row + half * 8].x;
      }
    }
  };
  __syncthreads();  // the barriers are initialised

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % PV_STAGES;
    if (TILE_SOFTMAX && tile * PV_BLOCK_K % REFERENCE_KEYS == 0) next_reference(tile * PV_BLOCK_K / REFERENCE_KEYS);
    mbarrier_wait(smem_address + BARRIERS + 8 * stage, tile / PV_STAGES % 2);
    const uint32_t stage_smem = smem_address + stage * STAGE_BYTES;
    const uint64_t p_descriptor = matrix_descriptor(stage_smem + warpgroup * P_TILE_BYTES, 0);
    const uint64_t v_descriptor = matrix_descriptor(stage_smem + V_OFFSET, PV_BLOCK_K * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < PV_BLOCK_K / 16; ++step) {
      const int p_offset = step / 4 * SCORE_CHUNK_BYTES + step % 4 * 32;
      wgmma_pv(o, p_descriptor + descriptor_step(p_offset), v_descriptor + descriptor_step(step * 16 * 128), true);
    }
    wgmma_commit();
    wgmma_wait<0>();  // left under way into the next round, ptxas would serialize them (C7515)
    pin_registers(o);
    __syncthreads();  // no warpgroup still reads this tile
    if (threadIdx.x == 0 && tile + PV_STAGES < tiles) load_p(tile + PV_STAGES), load_v(tile + PV_STAGES);
    __syncwarp();
  }
  __syncthreads();  // no warpgroup still reads the ring, which O overwrites
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (MERGE_LATE) sum[half] = merge.sum[half];
    inverse[half] = sum[half] > 0.f ? __fdividef(1.f, sum[half]) : 0.f;  // 0 for a row that sees no key
  }
  const uint32_t o_offset = warpgroup * Tiles::bytes(64);
  output_to_shared<Element>(o, inverse, smem_address + o_offset, warp % 4, lane);
  __syncwarp();  // all rows of the warp are written
  Element* row_gmem = o_gmem + batch * o_batch_stride + head * o_head_stride + warp_row * o_row_stride;
  rows_to_global<HEAD_DIM>(smem + o_offset, row_gmem, o_row_stride, seqlen_q - warp_row, warp % 4, lane);
}
