// large_head_tensor.cuh: the two products of attention over a slice of head_dim on the tensor cores, fp32 by three tf32
// products each. They stand in for those of large_head_products.cuh. With g = lane / 4 and t = lane % 4 throughout.
#include "device/ptx/element.cuh"
#include "device/copy/vector.cuh"
#include "device/ptx/mma_m16n8k8_tf32.cuh"

// sum += q kᵀ over 16 dimensions, two products of depth 8. Tensor cores cut sums off where fp32 rounds them: no more is
// added up there.
__device__ __forceinline__ void add_16_dims_tf32(float (&sum)[4], const uint32_t (&q_big)[2][4],
                                                 const uint32_t (&q_small)[2][4], const uint32_t (&k_big)[4],
                                                 const uint32_t (&k_small)[4]) {
  float part[4] = {};
#pragma unroll
  for (int depth = 0; depth < 2; depth++) {  // the small ones first, while the sum is small
    mma_m16n8k8_tf32(part, q_small[depth], k_big[2 * depth], k_big[2 * depth + 1]);
    mma_m16n8k8_tf32(part, q_big[depth], k_small[2 * depth], k_small[2 * depth + 1]);
  }
#pragma unroll
  for (int depth = 0; depth < 2; depth++) mma_m16n8k8_tf32(part, q_big[depth], k_big[2 * depth], k_big[2 * depth + 1]);
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] += part[i];
}

// S[BLOCK_M, BLOCK_N] = Q Kᵀ. A warp has a tile of ROWS x KEYS scores. The order of head_dim in a product is free, so
// that lane t takes dimensions 4t … 4t+3 of 16 by one load: 4t, 4t+1 are its t and t+4 of the first product of depth 8,
// 4t+2, 4t+3 of the second.
template <int BLOCK_M, int BLOCK_N, int SLICE, int WARPS, int ROWS, int KEYS, int UNROLL> struct ScoreProductTf32 {
  static constexpr int KEY_TILES = BLOCK_N / KEYS, TILES = BLOCK_M / ROWS * KEY_TILES, M_TILES = ROWS / 16,
                       N_TILES = KEYS / 8;
  static_assert(KEY_TILES * KEYS == BLOCK_N && TILES / KEY_TILES * ROWS == BLOCK_M, "whole tiles");
  static_assert(M_TILES * 16 == ROWS && N_TILES * 8 == KEYS && SLICE % 16 == 0, "whole products");

  template <typename Element, int STRIDE, typename QRow, typename KRow, typename Behind>
  static __device__ __forceinline__ void multiply(float* scores,  // [BLOCK_M, STRIDE], the first BLOCK_N columns of it
                                                  QRow q_row, KRow k_row,    // [SLICE] each
                                                  float4*, Behind behind) {  // see SpreadScoreProduct
    behind();
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int tile = threadIdx.x / 32; tile < TILES; tile += WARPS) {
      const int first_row = tile / KEY_TILES * ROWS, first_key = tile % KEY_TILES * KEYS;
      const Element *q[2 * M_TILES], *k[N_TILES];
#pragma unroll
      for (int i = 0; i < 2 * M_TILES; i++) q[i] = q_row(first_row + g + 8 * i) + 4 * t;
#pragma unroll
      for (int j = 0; j < N_TILES; j++) k[j] = k_row(first_key + g + 8 * j) + 4 * t;
      float sum[M_TILES][N_TILES][4] = {};
#pragma unroll UNROLL
      for (int dim = 0; dim < SLICE; dim += 16) {
        uint32_t q_big[M_TILES][2][4], q_small[M_TILES][2][4];  // of each product of depth 8
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
          const auto four = load_vector<4>(q[i] + dim);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int at = i % 2 + e % 2 * 2;
            split_tf32(to_float(four.at[e]), q_big[i / 2][e / 2][at], q_small[i / 2][e / 2][at]);
          }
        }
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
          const auto four = load_vector<4>(k[j] + dim);
          uint32_t k_big[4], k_small[4];
#pragma unroll
          for (int e = 0; e < 4; e++) split_tf32(to_float(four.at[e]), k_big[e], k_small[e]);
#pragma unroll
          for (int m = 0; m < M_TILES; m++) add_16_dims_tf32(sum[m][j], q_big[m], q_small[m], k_big, k_small);
        }
      }
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int j = 0; j < N_TILES; j++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float* two = scores + (first_row + 16 * m + 8 * half + g) * STRIDE + first_key + 8 * j + 2 * t;
            *reinterpret_cast<float2*>(two) = make_float2(sum[m][j][2 * half], sum[m][j][2 * half + 1]);
          }
    }
  }
};

// O[ROW_COUNT, SLICE] += P V for the rows of this group of THREADS threads. A warp has all rows and every THREADS-th
// run of 32 columns: of a run, column 4n + j is column n of product j, so that lane g reads its V by one load, and lane
// t owns columns 8t … 8t+7. Keys 2t, 2t+1 of 8 are a product's t and t+4.
template <int ROW_COUNT, int SLICE, int THREADS, int UNROLL> struct ValueProductTf32 {
  static constexpr int ROWS = ROW_COUNT, M_TILES = ROWS / 16, RUNS = SLICE / THREADS;
  static_assert(M_TILES * 16 == ROWS && RUNS * THREADS == SLICE && THREADS % 32 == 0, "whole products");
  float o[M_TILES][RUNS][4][4];  // [rows, run, product, as in the fragment C]

  static __device__ __forceinline__ int first_column(int run) {
    return (threadIdx.x % THREADS / 32 + run * (THREADS / 32)) * 32;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int run = 0; run < RUNS; run++)
#pragma unroll
        for (int i = 0; i < 16; i++) o[m][run][i / 4][i % 4] = 0.f;
  }
  __device__ __forceinline__ void scale_rows(const float* factor_smem) {  // [ROWS]
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      const float factor[2] = {factor_smem[16 * m + g], factor_smem[16 * m + 8 + g]};
#pragma unroll
      for (int run = 0; run < RUNS; run++)
#pragma unroll
        for (int i = 0; i < 16; i++) o[m][run][i / 4][i % 4] *= factor[i % 4 / 2];
    }
  }
  template <typename Element, int KEYS, int STRIDE, typename VRow>
  __device__ __forceinline__ void accumulate(const float* p_smem,  // [ROWS, STRIDE], the first KEYS columns of it
                                             VRow v_row) {         // [SLICE] each
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
      float part[M_TILES][4][4] = {};
#pragma unroll UNROLL
      for (int key = 0; key < KEYS; key += 8) {
        uint32_t p_big[M_TILES][4], p_small[M_TILES][4], v_big[2][4], v_small[2][4];
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
          const float2 two = *reinterpret_cast<const float2*>(p_smem + (8 * i + g) * STRIDE + key + 2 * t);
          split_tf32(two.x, p_big[i / 2][i % 2], p_small[i / 2][i % 2]);
          split_tf32(two.y, p_big[i / 2][i % 2 + 2], p_small[i / 2][i % 2 + 2]);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const auto four = load_vector<4>(v_row(key + 2 * t + k) + first_column(run) + 4 * g);
#pragma unroll
          for (int j = 0; j < 4; j++) split_tf32(to_float(four.at[j]), v_big[k][j], v_small[k][j]);
        }
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
          for (int j = 0; j < 4; j++) mma_m16n8k8_tf32(part[m][j], p_small[m], v_big[0][j], v_big[1][j]);
#pragma unroll
          for (int j = 0; j < 4; j++) mma_m16n8k8_tf32(part[m][j], p_big[m], v_small[0][j], v_small[1][j]);
#pragma unroll
          for (int j = 0; j < 4; j++) mma_m16n8k8_tf32(part[m][j], p_big[m], v_big[0][j], v_big[1][j]);
        }
      }
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < 16; i++) o[m][run][i / 4][i % 4] += part[m][i / 4][i % 4];
    }
  }
  // Rows from `valid_rows` on are not stored.
  template <typename Element, typename ORow>
  __device__ __forceinline__ void store(ORow o_row_gmem, int valid_rows) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
      if (8 * i + g >= valid_rows) continue;
      Element* row_gmem = o_row_gmem(8 * i + g);
#pragma unroll
      for (int run = 0; run < RUNS; run++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          float four[4];
#pragma unroll
          for (int j = 0; j < 4; j++) four[j] = o[i / 2][run][j][i % 2 * 2 + n];
          store_floats(row_gmem + first_column(run) + 8 * t + 4 * n, four);
        }
    }
  }
};
