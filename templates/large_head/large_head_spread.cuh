// large_head_spread.cuh: S = Q Kᵀ on the tensor cores, fp32 by three tf32 products each, every warp over a part of the
// slice of head_dim (in the order of head_dim of large_head_tensor.cuh). PARTS warps share a tile of ROWS x KEYS
// scores. An element of K is then wanted by one lane of one warp: it comes from global memory into that lane's
// registers, with no wait but that for itself, and is split once. AHEAD steps of 16 dimensions are under way at once.
#include "device/ptx/element.cuh"
#include "device/copy/vector.cuh"
#include "device/ptx/mma_m16n8k8_tf32.cuh"
#include "large_head/large_head_tensor.cuh"

template <int BLOCK_M, int BLOCK_N, int SLICE, int WARPS, int ROWS, int KEYS, int AHEAD> struct SpreadScoreProduct {
  static constexpr int KEY_TILES = BLOCK_N / KEYS, TILES = BLOCK_M / ROWS * KEY_TILES, PARTS = WARPS / TILES;
  static constexpr int DIMS = SLICE / PARTS, STEPS = DIMS / 16;  // of a warp
  static constexpr int M_TILES = ROWS / 16, N_TILES = KEYS / 8, FRAGMENTS = M_TILES * N_TILES;
  static constexpr int VECTORS = TILES * FRAGMENTS * 32;  // of 4 scores: the fragments of the block
  static constexpr int LOADED = STEPS % AHEAD == 0 ? AHEAD : STEPS < AHEAD ? STEPS : 1;
  static_assert(KEY_TILES * KEYS == BLOCK_N && TILES / KEY_TILES * ROWS == BLOCK_M && PARTS * TILES == WARPS,
                "whole tiles, one per warp");
  static_assert(M_TILES * 16 == ROWS && N_TILES * 8 == KEYS && STEPS * 16 * PARTS == SLICE, "whole products");

  template <typename Element, int STRIDE, typename QRow, typename KRow, typename Behind>
  static __device__ __forceinline__ void multiply(float* scores,  // [BLOCK_M, STRIDE], the first BLOCK_N columns of it
                                                  QRow q_row, KRow k_row,  // [SLICE] each
                                                  float4* sums_smem,       // [PARTS, VECTORS]
                                                  Behind behind) {         // called once the first loads are under way
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile = warp % TILES, part = warp / TILES, first_dim = part * DIMS + 4 * t;
    const Element *q_gmem[2 * M_TILES], *k_gmem[N_TILES];
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) q_gmem[i] = q_row(tile / KEY_TILES * ROWS + 8 * i + g) + first_dim;
#pragma unroll
    for (int j = 0; j < N_TILES; j++) k_gmem[j] = k_row(tile % KEY_TILES * KEYS + 8 * j + g) + first_dim;
    Vector<Element, 4> q[LOADED][2 * M_TILES], k[LOADED][N_TILES];
#pragma unroll
    for (int slot = 0; slot < LOADED; slot++) {
#pragma unroll
      for (int i = 0; i < 2 * M_TILES; i++) q[slot][i] = load_vector<4>(q_gmem[i] + 16 * slot);
#pragma unroll
      for (int j = 0; j < N_TILES; j++) k[slot][j] = load_vector<4>(k_gmem[j] + 16 * slot);
    }
    behind();

    float sum[FRAGMENTS][4] = {};
#pragma unroll 1  // unrolled, all loads would move to the front and take more registers than there are
    for (int first = 0; first < STEPS; first += LOADED) {
#pragma unroll
      for (int slot = 0; slot < LOADED; slot++) {
        const int next = 16 * (first + LOADED + slot);  // of a step, whose loads take the place of those of this one
        uint32_t q_big[M_TILES][2][4], q_small[M_TILES][2][4];  // of each product of depth 8
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int at = i % 2 + e % 2 * 2;
            split_tf32(to_float(q[slot][i].at[e]), q_big[i / 2][e / 2][at], q_small[i / 2][e / 2][at]);
          }
          if (next < DIMS) q[slot][i] = load_vector<4>(q_gmem[i] + next);
        }
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
          uint32_t k_big[4], k_small[4];
#pragma unroll
          for (int e = 0; e < 4; e++) split_tf32(to_float(k[slot][j].at[e]), k_big[e], k_small[e]);
          if (next < DIMS) k[slot][j] = load_vector<4>(k_gmem[j] + next);
#pragma unroll
          for (int m = 0; m < M_TILES; m++)
            add_16_dims_tf32(sum[m * N_TILES + j], q_big[m], q_small[m], k_big, k_small);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < FRAGMENTS; i++) {
      sums_smem[part * VECTORS + (tile * FRAGMENTS + i) * 32 + lane] =
          make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
    __syncthreads();  // the sums of all warps are visible to all
    for (int i = threadIdx.x; i < VECTORS; i += 32 * WARPS) {
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const float4 sums = sums_smem[p * VECTORS + i];
        total.x += sums.x, total.y += sums.y, total.z += sums.z, total.w += sums.w;
      }
      const int its_tile = i / 32 / FRAGMENTS, fragment = i / 32 % FRAGMENTS;  // its lane is this one
      const int row = its_tile / KEY_TILES * ROWS + fragment / N_TILES * 16 + g,
                key = its_tile % KEY_TILES * KEYS + fragment % N_TILES * 8;
      float* two = scores + row * STRIDE + key + 2 * t;
      *reinterpret_cast<float2*>(two) = make_float2(total.x, total.y);
      *reinterpret_cast<float2*>(two + 8 * STRIDE) = make_float2(total.z, total.w);
    }
  }
};
