// large_head_products.cuh: the two products of attention on CUDA cores over a slice of head_dim, in 16-byte vectors of
// it. Rows are given as functions from their number to where they begin, in shared or in global memory.
#include "device/copy/vector.cuh"
#include "large_head/reduce_scatter.cuh"

// S[BLOCK_M, BLOCK_N] = Q Kᵀ. LANES neighbouring lanes share a tile of ROWS x KEYS scores: each takes every LANES-th
// vector of the rows, so that a vector from memory serves ROWS or KEYS multiply-adds a element; their sums are added up
// by shuffles.
template <int BLOCK_M, int BLOCK_N, int CHUNKS, int THREADS, int LANES, int ROWS, int KEYS, int UNROLL>
struct ScoreProduct {
  static constexpr int KEY_TILES = BLOCK_N / KEYS, TILES = BLOCK_M / ROWS * KEY_TILES;
  static constexpr int GROUPS = THREADS / LANES, SUMS = ROWS * KEYS;
  static constexpr int STEPS = (CHUNKS + LANES - 1) / LANES;  // vectors of a row per lane
  static_assert(KEY_TILES * KEYS == BLOCK_N && TILES / KEY_TILES * ROWS == BLOCK_M, "whole tiles");
  static_assert(TILES % (32 / LANES) == 0, "all lanes of a warp have a tile or none has: they meet in shuffles");

  template <typename Element, int STRIDE, typename QRow, typename KRow, typename Behind>
  static __device__ __forceinline__ void multiply(float* scores,  // [BLOCK_M, STRIDE], the first BLOCK_N columns of it
                                                  QRow q_row, KRow k_row,    // [CHUNKS · 16 bytes] each
                                                  float4*, Behind behind) {  // see SpreadScoreProduct
    behind();
    constexpr int VECTOR = 16 / sizeof(Element);
    // A long fp32 sum is taken in segments: added one by one, hundreds of products of large logits lose what fp32
    // attention may lose.
    constexpr int SEGMENT = STEPS * VECTOR > 64 ? 32 / VECTOR : STEPS;  // steps
    const int lane = threadIdx.x % LANES;
    for (int tile = threadIdx.x / LANES; tile < TILES; tile += GROUPS) {
      const int first_row = tile / KEY_TILES * ROWS, first_key = tile % KEY_TILES * KEYS;
      const Element *q[ROWS], *k[KEYS];
#pragma unroll
      for (int i = 0; i < ROWS; i++) q[i] = q_row(first_row + i) + lane * VECTOR;
#pragma unroll
      for (int j = 0; j < KEYS; j++) k[j] = k_row(first_key + j) + lane * VECTOR;
      float sum[SUMS];
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] = 0.f;
#pragma unroll 1
      for (int first_step = 0; first_step < STEPS; first_step += SEGMENT) {
        float part[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) part[i] = 0.f;
#pragma unroll UNROLL
        for (int step = first_step; step < first_step + SEGMENT; step++) {
          if (CHUNKS % (SEGMENT * LANES) != 0 && step * LANES + lane >= CHUNKS) break;
          float q_frag[ROWS][VECTOR];
#pragma unroll
          for (int i = 0; i < ROWS; i++) to_floats(load_vector<VECTOR>(q[i] + step * LANES * VECTOR), q_frag[i]);
#pragma unroll
          for (int j = 0; j < KEYS; j++) {
            float k_frag[VECTOR];
            to_floats(load_vector<VECTOR>(k[j] + step * LANES * VECTOR), k_frag);
#pragma unroll
            for (int e = 0; e < VECTOR; e++)
#pragma unroll
              for (int i = 0; i < ROWS; i++) part[i * KEYS + j] = fmaf(q_frag[i][e], k_frag[e], part[i * KEYS + j]);
          }
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] += part[i];
      }
      reduce_scatter<LANES, SUMS>(sum, lane);
      constexpr int KEPT = SUMS > LANES ? SUMS / LANES : 1, HOLDERS = SUMS < LANES ? LANES / SUMS : 1;
      if (HOLDERS > 1 && lane % HOLDERS != 0) continue;  // the lane before has the same sum
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const int which = lane / HOLDERS * KEPT + i;
        scores[(first_row + which / KEYS) * STRIDE + first_key + which % KEYS] = sum[i];
      }
    }
  }
};

// O[ROW_COUNT, CHUNKS vectors] += P V for the rows of this group of THREADS threads. A thread has every THREADS-th
// vector of the rows, in fp32.
template <int ROW_COUNT, int CHUNKS, int VECTOR, int THREADS, int UNROLL> struct ValueProduct {
  static constexpr int ROWS = ROW_COUNT;
  static constexpr int VECTORS = (CHUNKS + THREADS - 1) / THREADS;  // per thread
  static_assert(VECTORS * THREADS >= CHUNKS, "the register tiles cover the whole slice of head_dim");
  float o[ROWS][VECTORS][VECTOR];

  static __device__ __forceinline__ int vector_at(int c) { return threadIdx.x % THREADS + c * THREADS; }
  static __device__ __forceinline__ bool exists(int c) { return CHUNKS % THREADS == 0 || vector_at(c) < CHUNKS; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int c = 0; c < VECTORS; c++)
#pragma unroll
        for (int e = 0; e < VECTOR; e++) o[i][c][e] = 0.f;
  }
  __device__ __forceinline__ void scale_rows(const float* factor_smem) {  // [ROWS]
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const float factor = factor_smem[i];
#pragma unroll
      for (int c = 0; c < VECTORS; c++)
#pragma unroll
        for (int e = 0; e < VECTOR; e++) o[i][c][e] *= factor;
    }
  }
  template <typename Element, int KEYS, int STRIDE, typename VRow>
  __device__ __forceinline__ void accumulate(const float* p_smem,  // [ROWS, STRIDE], the first KEYS columns of it
                                             VRow v_row) {         // [CHUNKS · 16 bytes] each
#pragma unroll UNROLL
    for (int key = 0; key < KEYS; key += 4) {
      float p[ROWS][4];
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        const float4 four = *reinterpret_cast<const float4*>(p_smem + i * STRIDE + key);
        p[i][0] = four.x, p[i][1] = four.y, p[i][2] = four.z, p[i][3] = four.w;
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const Element* v = v_row(key + k);
#pragma unroll
        for (int c = 0; c < VECTORS; c++) {  // a vector past the row's end is read from the last one and never stored
          float v_frag[VECTOR];
          to_floats(load_vector<VECTOR>(v + (exists(c) ? vector_at(c) : CHUNKS - 1) * VECTOR), v_frag);
#pragma unroll
          for (int e = 0; e < VECTOR; e++)
#pragma unroll
            for (int i = 0; i < ROWS; i++) o[i][c][e] = fmaf(p[i][k], v_frag[e], o[i][c][e]);
        }
      }
    }
  }
  // Rows from `valid_rows` on are not stored.
  template <typename Element, typename ORow>
  __device__ __forceinline__ void store(ORow o_row_gmem, int valid_rows) const {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int c = 0; c < VECTORS; c++) {
        if (i < valid_rows && exists(c)) store_floats(o_row_gmem(i) + vector_at(c) * VECTOR, o[i][c]);
      }
    }
  }
};
