// products.cuh: what a consumer warpgroup of backward_wgmma holds, and the products of its 64 keys. Needs the constants
// of backward_wgmma.cu.j2.
#include "device/ptx/cluster.cuh"
#include "device/ptx/keep.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/copy/ring_position.cuh"
#include "device/copy/tensor_tile.cuh"
#include "backward_wgmma/key_sums.cuh"
#include "backward_wgmma/key_work.cuh"
#include "backward_wgmma/producer.cuh"
#include "backward_wgmma/query_rows.cuh"
#include "backward_wgmma/query_walk.cuh"
#include "backward_wgmma/shared_layout.cuh"

// Factors are applied to probabilities once these are rounded; but not where the gradient of the bias is asked for,
// which has none. Of a soft cap alone they are made of its scores then, and need no registers.
constexpr bool FACTORS_IN_P = Gradient::FACTORED && P_IN_REGISTERS && !BIAS_GRADIENT;
constexpr int TERMS = DKV_BY_DIMS ? 2 : SCORE_COLUMNS / 4;
constexpr int FACTORS = Gradient::FACTORED && !(FACTORS_IN_P && Gradient::OF_RESULT) ? SCORE_COLUMNS / 2 : 1;

// The gradient of the bias is of dS before factors. Without any it is added from shared memory, where a thread has
// eight keys side by side.
constexpr bool BIAS_FROM_SHARED = BIAS_GRADIENT && !Gradient::FACTORED;

// What a warpgroup holds in arrays, of Sᵀ[64 keys, SCORE_COLUMNS queries] and its like in the order of wgmma's
// accumulators: lane 4 g + t of a warp has keys g and g + 8, of eight queries 2 t and 2 t + 1. DKV_BY_DIMS: of S[64
// queries, SCORE_COLUMNS keys]; dVᵀ and dKᵀ go by 64 dimensions.
struct Fragments {
  float s[SCORE_COLUMNS / 2];                         // scores, then probabilities
  float dp[SCORE_COLUMNS / 2];                        // of the probabilities, then of the scores
  uint32_t p[P_IN_REGISTERS ? QUERY_STEPS : 1][4];    // probabilities, rounded
  uint32_t ds[DS_IN_REGISTERS ? QUERY_STEPS : 1][4];  // gradients of the scores, rounded
  float terms[TERMS];                                 // of the queries: log2 of their sums, then deltas
  float factors[FACTORS];                             // of the scores' gradients
  uint32_t v[V_STEPS > 0 ? V_STEPS : 1][4];
  float dq[DQ_COLUMNS / 2];
  float dq_share[DQ_SHARE > 0 ? DQ_SHARE / 2 : 1];
  float dk[DK_TILES][DK_COLUMNS / 2], dv[DV_TILES][DV_COLUMNS / 2];
  SeenKeys<2, SCORE_COLUMNS> seen;  // by the lane's keys g and g + 8: queries of a PARTIAL tile
};

// The gradient of the bias, in float32. A stride is 0 where batches or heads share it.
struct BiasSums {
  float* gmem;
  int64_t batch_stride, head_stride, row_stride;
};

struct RowsOfKeys {
  Element* gmem;
  int64_t batch_stride, head_stride, row_stride;
  // The first row of a block.
  __device__ __forceinline__ Element* of(const KeyWork& work) const {
    const int key = work.sequence.first_key + work.block.first_key;
    return gmem + (work.block.batch * batch_stride + work.block.kv_head * head_stride + key * row_stride);
  }
};
// Where dK and dV go.
struct KeyGradients {
  RowsOfKeys dk, dv;
  float softmax_scale;
  KeySums sums;
};

// Pᵀ or dSᵀ of 64 keys as wgmma's A operand, 16 queries at a time: in registers, or where it lies in shared memory.
template <int STEPS> struct RegisterSteps {
  const uint32_t (&at)[STEPS][4];
  __device__ __forceinline__ const uint32_t (&operator[](int step) const)[4] { return at[step]; }
};
struct SharedSteps {
  uint64_t descriptor;
  __device__ __forceinline__ uint64_t operator[](int step) const {
    return descriptor + descriptor_step(step * 16 * 128);
  }
};

struct Products {
  float (&s)[SCORE_COLUMNS / 2];
  float (&dp)[SCORE_COLUMNS / 2];
  uint32_t (&p)[P_IN_REGISTERS ? QUERY_STEPS : 1][4];
  uint32_t (&ds)[DS_IN_REGISTERS ? QUERY_STEPS : 1][4];
  float (&terms_of_lane)[TERMS];
  float (&factors)[FACTORS];
  uint32_t (&v)[V_STEPS > 0 ? V_STEPS : 1][4];
  float (&dq)[DQ_COLUMNS / 2];
  float (&dq_share)[DQ_SHARE > 0 ? DQ_SHARE / 2 : 1];
  float (&dk)[DK_TILES][DK_COLUMNS / 2];
  float (&dv)[DV_TILES][DV_COLUMNS / 2];
  SeenKeys<2, SCORE_COLUMNS>& seen;
  unsigned char* smem;
  const KeyWorks& works;
  KeyWork& work;  // at hand: its mask, its block
  const Mask& mask;
  const KeyBlock& block;
  const QueryTerms& terms;
  float* dq_sums_gmem;
  const float softmax_scale_log2;
  const Variant& variant;
  const BiasSums& bias_sums;
  const QueryRows& rows;  // ONE_LAUNCH
  const int group;        // heads of the block's K/V head
  ConsumerWalk walk;
  uint32_t smem_address;
  int warp, lane;             // warp of the warpgroup
  int warpgroup, keys, dims;  // its number; its 64 keys and its part of the dimensions
  Queries see_all;            // that see all of these keys
  int lane_key;               // of this lane's row g, DKV_BY_DIMS its first column
  RingPosition<Q_STAGES> q;   // of the tile at hand
  RingPosition<DO_STAGES> d;
  int score_stage = 0;     // of dS and P
  uint32_t ds_parity = 0;  // of the barriers of dS
  int done = 0;            // ONE_LAUNCH: queries of the tiles before

  __device__ __forceinline__ Products(Fragments& f, unsigned char* smem, int block_warp, const KeyWorks& works,
                                      KeyWork& work, int group, const QueryTerms& terms, float* dq_sums_gmem,
                                      float softmax_scale_log2, const Variant& variant, const BiasSums& bias_sums,
                                      const QueryRows& rows)
      : s(f.s),
        dp(f.dp),
        p(f.p),
        ds(f.ds),
        terms_of_lane(f.terms),
        factors(f.factors),
        v(f.v),
        dq(f.dq),
        dq_share(f.dq_share),
        dk(f.dk),
        dv(f.dv),
        seen(f.seen),
        smem(smem),
        works(works),
        work(work),
        mask(work.mask),
        block(work.block),
        terms(terms),
        dq_sums_gmem(dq_sums_gmem),
        softmax_scale_log2(softmax_scale_log2),
        variant(variant),
        bias_sums(bias_sums),
        rows(rows),
        group(group),
        walk(block, group),
        smem_address(shared_address(smem)),
        warp(block_warp % 4),
        lane(threadIdx.x % 32),
        warpgroup(block_warp / 4),
        keys(block_warp / 4 / DIM_GROUPS),
        dims(block_warp / 4 % DIM_SHARES) {
    enter();
  }

  // ONE_LAUNCH: whether this launch is the only one: the block has all keys.
  __device__ __forceinline__ bool alone() const { return ONE_LAUNCH && dq_sums_gmem == nullptr; }
  // What is of the block's keys.
  __device__ __forceinline__ void enter() {
    const int key = block.first_key + keys * 64;
    see_all = mask.that_see_all(key, DKV_BY_DIMS ? BLOCK_N : 64);
    lane_key = key + (DKV_BY_DIMS ? lane % 4 * 2 : warp * 16 + lane / 4);
    keep_in_register(see_all.first), keep_in_register(lane_key);
    if constexpr (Mask::WINDOW) keep_in_register(see_all.end);
  }

  // OWN_KEYS_FIRST: the barrier of dS of a warpgroup's keys. A stage later none can be a phase ahead of one that waits.
  __device__ __forceinline__ int scores_of(int of) const { return Smem::DS_FULL + 8 * (score_stage * WARPGROUPS + of); }
  __device__ __forceinline__ void release(int barrier) const {
    if (lane == 0) mbarrier_arrive(smem_address + barrier);
  }

  __device__ __forceinline__ void multiply_s() {  // Sᵀ = K Qᵀ
    mbarrier_wait(smem_address + Smem::Q_FULL + 8 * q.stage, q.parity);
    multiply_rows<Tiles, 0>(s, v, Smem::K, Smem::Q + q.stage * Smem::Q_TILE_BYTES);
  }
  __device__ __forceinline__ void multiply_dp() {  // dPᵀ = V dOᵀ
    mbarrier_wait(smem_address + Smem::DO_FULL + 8 * d.stage, d.parity);
    multiply_rows<ValueTiles, V_STEPS>(dp, v, Smem::V, Smem::DO + d.stage * Smem::DO_TILE_BYTES);
  }
  // V of this warpgroup's keys.
  __device__ __forceinline__ void load_values() {
    const int row = keys * 64 + warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < V_STEPS; ++step)
      ldmatrix_x4(v[step], smem_address + Smem::V + step / 4 * (BLOCK_N * 128) + row * 128 +
                               ((step % 4 * 2 + lane / 16) ^ row % 8) * 16);
  }
  // IN_REGISTERS: so many steps of the keys' rows.
  template <class Of, int IN_REGISTERS, int STEPS>
  __device__ __forceinline__ void multiply_rows(float (&to)[SCORE_COLUMNS / 2], const uint32_t (&registers)[STEPS][4],
                                                int keys_place, int queries_place) {
    const uint64_t of_keys = own_descriptor(smem_address + keys_place + keys * 64 * 128, 0);
    const uint64_t of_queries = own_descriptor(smem_address + queries_place + dims * SCORE_QUERIES * 128, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Of::DIM_STEPS; ++step) {
      const uint64_t a = of_keys + descriptor_step(Of::step_offset(step, BLOCK_N));
      const uint64_t b = of_queries + descriptor_step(Of::step_offset(step, BLOCK_M));
      if constexpr (IN_REGISTERS > 0) {
        if (step < IN_REGISTERS) {
          wgmma_s(to, registers[step], b, step > 0);
          continue;
        }
      }
      wgmma_s(to, DKV_BY_DIMS ? b : a, DKV_BY_DIMS ? a : b, step > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_dv() {  // dV += Pᵀ dO
    const int stage = BY_PRODUCTS ? 0 : score_stage;
    multiply_queries<P_IN_REGISTERS>(dv, Smem::DO + d.stage * Smem::DO_TILE_BYTES, p,
                                     Smem::P + stage * Smem::SCORE_TILE_BYTES,
                                     [](auto& x, const auto& a, const auto& b) { wgmma_dv(x, a, b, true); });
  }
  __device__ __forceinline__ void multiply_dk() {  // dK += dSᵀ Q
    multiply_queries<DS_IN_REGISTERS>(dk, Smem::Q + q.stage * Smem::Q_TILE_BYTES, ds,
                                      Smem::DS + score_stage * Smem::SCORE_TILE_BYTES,
                                      [](auto& x, const auto& a, const auto& b) { wgmma_dk(x, a, b, true); });
  }
  // Of P or dS, and a tile of dO or Q.
  template <bool IN_REGISTERS, int TILES, int FLOATS, int STEPS, class Multiply>
  __device__ __forceinline__ void multiply_queries(float (&to)[TILES][FLOATS], int tile_place,
                                                   const uint32_t (&registers)[STEPS][4], int score_place,
                                                   const Multiply& multiply) {
    const uint64_t of_queries = columns_descriptor(tile_place, BLOCK_M, dims * 2 * FLOATS);
    const auto scores = scores_by_steps<IN_REGISTERS>(registers, score_place);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int step = 0; step < QUERY_STEPS; ++step) {
        const uint64_t rows = of_queries + descriptor_step(tile * (BLOCK_M * 128) + step * 16 * 128);
        if constexpr (DKV_BY_DIMS) multiply(to[tile], rows, scores[step]);
        else multiply(to[tile], scores[step], rows);
      }
    }
    wgmma_commit();
  }
  template <int TILES, int FLOATS> __device__ __forceinline__ void pin_tiles(float (&x)[TILES][FLOATS]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) pin_registers(x[tile]);
  }
  // dQ = dS K of 64 queries and DQ_COLUMNS dimensions, or dQᵀ = Kᵀ dSᵀ of 64 dimensions and all queries.
  __device__ __forceinline__ void multiply_dq() {
    const int ds_smem = Smem::DS + score_stage * Smem::SCORE_TILE_BYTES;
    const int of_all = block.first_part() + warpgroup, part = of_all % SUM_TILES_ALONG, rows = of_all / SUM_TILES_ALONG;
    const uint64_t of_scores = own_descriptor(smem_address + ds_smem + (DQ_BY_DIMS ? 0 : rows * 64 * 128), 0);
    const uint64_t of_keys = columns_descriptor(Smem::K, BLOCK_N, DQ_BY_DIMS ? of_all * 64 : part * DQ_COLUMNS);
    if constexpr (OWN_KEYS_FIRST) {
      mbarrier_wait(smem_address + scores_of(warpgroup), ds_parity);
      wgmma_fence();
      multiply_keys(dq, of_scores, of_keys, warpgroup, false);
      wgmma_commit();
      mbarrier_wait(smem_address + scores_of(1 - warpgroup), ds_parity);
      wgmma_fence();
      multiply_keys(dq, of_scores, of_keys, 1 - warpgroup, true);
    } else {
      wgmma_fence();
      multiply_keys(dq, of_scores, of_keys);
    }
    if constexpr (DQ_SHARE > 0) {
      const int first = warpgroup * DQ_SHARE;  // of its queries
      multiply_keys(dq_share, own_descriptor(smem_address + ds_smem + first * 128, 0),
                    columns_descriptor(Smem::K, BLOCK_N, WARPGROUPS * 64));
    }
    wgmma_commit();
  }
  // PAIRED: dQ += dS K of the other block's keys.
  __device__ __forceinline__ void multiply_dq_of_other() {
    mbarrier_wait_cluster(smem_address + Smem::OTHER_FULL + 8 * score_stage, ds_parity);
    fence_proxy_async();  // what came from there is read by products
    const int ds_smem = Smem::OTHER_DS + score_stage * Smem::SCORE_TILE_BYTES;
    const int column = warpgroup * (DQ_BY_DIMS ? 64 : DQ_COLUMNS);  // of the half that is there
    wgmma_fence();
    multiply_keys(dq, own_descriptor(smem_address + ds_smem, 0), columns_descriptor(Smem::OTHER_K, BLOCK_N, column),
                  true);
    wgmma_commit();
  }
  // PAIRED: where something lies in the other block's shared memory.
  __device__ __forceinline__ uint32_t in_other(int place) const {
    return cluster_address(smem_address + place, block.key_tile % 2 ^ 1);
  }
  // All keys of a block.
  template <int FLOATS>
  __device__ __forceinline__ void multiply_keys(float (&to)[FLOATS], uint64_t of_scores, uint64_t of_keys,
                                                bool add = false) {
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {  // of keys
      const uint64_t ds_step = of_scores + descriptor_step(step / 4 * Smem::SCORE_GROUP_BYTES + step % 4 * 32);
      const uint64_t k_step = of_keys + descriptor_step(step * 16 * 128);
      wgmma_dq(to, DQ_BY_DIMS ? k_step : ds_step, DQ_BY_DIMS ? ds_step : k_step, add || step > 0);
    }
  }
  // The same of 64 keys.
  template <int FLOATS>
  __device__ __forceinline__ void multiply_keys(float (&to)[FLOATS], uint64_t of_scores, uint64_t of_keys, int of,
                                                bool add) {
    of_scores += of * (Smem::SCORE_GROUP_BYTES / 16), of_keys += of * (64 * 128 / 16);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t ds_step = of_scores + descriptor_step(step * 32),
                     k_step = of_keys + descriptor_step(step * 16 * 128);
      wgmma_dq(to, DQ_BY_DIMS ? k_step : ds_step, DQ_BY_DIMS ? ds_step : k_step, add || step > 0);
    }
  }
  __device__ __forceinline__ void pin_dq() {
    pin_registers(dq);
    if constexpr (DQ_SHARE > 0) pin_registers(dq_share);
  }
  // Of an operand whose rows lie along the depth of a product: columns from `column` on, of a tile of `rows` rows.
  __device__ __forceinline__ uint64_t columns_descriptor(int place, int rows, int column) const {
    return own_descriptor(smem_address + place + column / 64 * rows * 128 + column % 64 * 2, rows * 128);
  }
  // Sums of it with constants are not made ahead of the loop, and kept in registers.
  static __device__ __forceinline__ uint64_t own_descriptor(uint32_t address, uint32_t leading_bytes) {
    uint64_t descriptor = matrix_descriptor(address, leading_bytes);
    forget_origin(descriptor);
    return descriptor;
  }
  // Of this warpgroup's 64 keys, DKV_BY_DIMS of all.
  template <bool IN_REGISTERS, int STEPS>
  __device__ __forceinline__ auto scores_by_steps(const uint32_t (&registers)[STEPS][4], int place) const {
    if constexpr (IN_REGISTERS) return RegisterSteps<STEPS>{registers};
    else
      return SharedSteps{own_descriptor(smem_address + place + keys * Smem::SCORE_GROUP_BYTES,
                                        DKV_BY_DIMS ? Smem::SCORE_GROUP_BYTES : 0)};
  }
};
