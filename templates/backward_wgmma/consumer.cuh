// consumer.cuh: a consumer warpgroup of backward_wgmma: its 64 keys, its part of dK, dV and dQ, and how it goes through
// tiles of queries. Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/exp2.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/red.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/copy/wgmma_output.cuh"
#include "device/softmax/wgmma_scores.cuh"
#include "backward_wgmma/producer.cuh"
#include "backward_wgmma/products.cuh"
#include "backward_wgmma/query_rows.cuh"
#include "backward_wgmma/query_walk.cuh"
#include "backward_wgmma/shared_layout.cuh"

struct Consumer : Products {
  using Products::Products;

  __device__ __forceinline__ void run(const KeyGradients& to) {
    if constexpr (PAIRED) cluster_sync();              // the barriers of both blocks are initialised
    else named_barrier_sync<THREADS>(BARRIERS_READY);  // the barriers are
    if constexpr (CONSUMER_REGISTERS > 0) increase_registers<CONSUMER_REGISTERS>();
    grid_dependency_wait();  // dQ is cleared
    if (alone()) make_terms();
    if constexpr (CLAIMED) {
      for (uint32_t round = 0; take_claimed(smem, smem_address, works, work, round % 2); ++round) {
        __syncwarp();  // lanes that copied results, or did not, are back: wgmma wants whole warps
        walk = ConsumerWalk(block, group), enter();
        key_tile(to, round % 2);
      }
      grid_dependency_launch();
    } else {
      key_tile(to, 0);
    }
    if constexpr (PAIRED)
      __syncwarp(), cluster_sync();  // that of a block, until the other does not write there any more
  }

private:
  // `parity`: of the barriers of K and V.
  __device__ __forceinline__ void key_tile(const KeyGradients& to, uint32_t parity) {
    if constexpr (BY_PRODUCTS) {
      if (warpgroup == 0) key_tile_of<false, true>(to, parity);
      else key_tile_of<true, false>(to, parity);
    } else if constexpr (DQ_ALONE) {
      if (warpgroup == 0) key_tile_of<true, true>(to, parity);
      else key_tile_of<true, true, false>(to, parity);
    } else {
      key_tile_of<true, true>(to, parity);
    }
  }
  // DK, DV, DQ: what is this warpgroup's, of all that has a part.
  template <bool DK, bool DV, bool DQ = true>
  __device__ __forceinline__ void key_tile_of(const KeyGradients& to, uint32_t parity) {
    walk.begin(block, group);
#pragma unroll
    for (int i = 0; DK && i < DK_TILES * DK_COLUMNS / 2; ++i) dk[i / (DK_COLUMNS / 2)][i % (DK_COLUMNS / 2)] = 0.f;
#pragma unroll
    for (int i = 0; DV && i < DV_TILES * DV_COLUMNS / 2; ++i) dv[i / (DV_COLUMNS / 2)][i % (DV_COLUMNS / 2)] = 0.f;
    if constexpr (!CLAIMED) mbarrier_wait(smem_address + Smem::K_FULL, 0);
    mbarrier_wait(smem_address + Smem::V_FULL, parity);
    if constexpr (V_STEPS > 0) load_values();
    if constexpr (CLAIMED && V_STEPS > 0) fence_proxy_async(), __syncwarp();  // the next ones may come
    while (!walk.done()) {
      if constexpr (DK && DV) query_tile<DQ>();
      else if constexpr (DV) tile_of_values();
      else tile_of_keys();
    }
    if constexpr (CLAIMED) release(Smem::K_EMPTY);
    else grid_dependency_launch();
    if (QUERY_SPLIT > 1 && (!SPLIT_LAST || block.parts > 1)) {
      constexpr int DK_FLOATS = KeySums::OfKeys::TILE_FLOATS, DV_FLOATS = KeySums::OfValues::TILE_FLOATS;
      const int group = BY_PRODUCTS ? keys : warpgroup;
      float *dk_gmem = to.sums.part(work.sums), *dv_gmem = dk_gmem + KeySums::OfKeys::FLOATS;
      if constexpr (DK) KeySums::write(dk, dk_gmem + group * DK_FLOATS, warp, lane);
      if constexpr (DV) KeySums::write(dv, dv_gmem + group * DV_FLOATS, warp, lane);
    } else {
      named_barrier_sync<128 * WARPGROUPS>(SCORES);  // no product reads what lies where the results go
      if constexpr (DK)
        to_global<HEAD_DIM>(dk, CLAIMED ? Smem::DS : Smem::K, to.dk.of(work), to.dk.row_stride, to.softmax_scale);
      if constexpr (CLAIMED) __syncwarp();  // in the same place
      if constexpr (DV) to_global<VALUE_DIM>(dv, CLAIMED ? Smem::DS : Smem::V, to.dv.of(work), to.dv.row_stride, 1.f);
      if constexpr (CLAIMED) named_barrier_sync<128 * WARPGROUPS>(SCORES);  // the next dS may go there
    }
  }
  // Of all queries of the block.
  __device__ __forceinline__ void make_terms() const {
    float* log_sums = reinterpret_cast<float*>(smem + Smem::TERMS);
    rows.terms_to<128 * WARPGROUPS>(log_sums, log_sums + TERM_QUERIES, block.batch, block.kv_head,
                                    block.first_tile * BLOCK_M, block.tiles * BLOCK_M, threadIdx.x);
    named_barrier_sync<128 * WARPGROUPS>(SCORES);  // they are there
  }
  template <bool DQ> __device__ __forceinline__ void query_tile() {
    multiply_s(), take_tile(), load_seen(), multiply_dp();
    if constexpr (TERMS_EARLY) load_terms(log_sums());
    wgmma_wait<1>();
    pin_registers(s);
    score_tile();
    if constexpr (!DV_LAST) multiply_dv();
    score_gradients();
    if constexpr (WHOLE_HEADS) load_own_sums();
    gradients_to_shared();
    if constexpr (DQ) multiply_dq();
    multiply_dk();
    if constexpr (BIAS_FROM_SHARED) add_rows_to_bias();
    wgmma_wait<1>();  // dV and dQ are there
    pin_tiles(dv);
    if constexpr (DQ) pin_dq();
    release(Smem::DO_EMPTY + 8 * d.stage);
    if constexpr (DQ) add_dq();
    wgmma_wait<0>();
    pin_tiles(dk);
    release(Smem::Q_EMPTY + 8 * q.stage);
    next_stage();
  }
  // BY_PRODUCTS, of the warpgroup that has P and dV.
  __device__ __forceinline__ void tile_of_values() {
    multiply_s(), take_tile(), load_seen();
    if constexpr (TERMS_EARLY) load_terms(log_sums());
    wgmma_wait<0>();
    pin_registers(s);
    probabilities();
    if constexpr (DKV_BY_DIMS) named_barrier_sync<128>(OWN + warpgroup);  // no product of dV reads the last ones
    scores_to_shared(s, Smem::P);
    named_barrier_arrive<128 * WARPGROUPS>(PROBABILITIES);                // the other warpgroup may read them
    fence_proxy_async(), __syncwarp();                                    // all lanes have read their terms
    if constexpr (DKV_BY_DIMS) named_barrier_sync<128>(OWN + warpgroup);  // all warps have written
    release(Smem::Q_EMPTY + 8 * q.stage);
    mbarrier_wait(smem_address + Smem::DO_FULL + 8 * d.stage, d.parity);
    multiply_dv();
    named_barrier_sync<128 * WARPGROUPS>(SCORES);  // dS of the other warpgroup is there, and it has read P
    multiply_dq();
    wgmma_wait<1>();
    pin_tiles(dv);
    release(Smem::DO_EMPTY + 8 * d.stage);
    if constexpr (PAIRED) multiply_dq_of_other();
    wgmma_wait<0>();
    pin_dq();
    if constexpr (PAIRED) release_other();
    add_dq();
    next_stage();
  }
  // Of the one that has dS and dK.
  __device__ __forceinline__ void tile_of_keys() {
    mbarrier_wait(smem_address + Smem::Q_FULL + 8 * q.stage, q.parity);
    take_tile(), multiply_dp();
    if constexpr (TERMS_EARLY) load_terms(deltas());
    wgmma_wait<0>();
    pin_registers(dp);
    if constexpr (!TERMS_EARLY) load_terms(deltas());
    fence_proxy_async(), __syncwarp();  // all lanes have read their terms
    release(Smem::DO_EMPTY + 8 * d.stage);
    named_barrier_sync<128 * WARPGROUPS>(PROBABILITIES);  // P is there, and the last dS is read no more
    read_probabilities(), score_gradients(), gradients_to_shared();
    multiply_dq(), multiply_dk();
    if constexpr (PAIRED) {
      multiply_dq_of_other();
      wgmma_wait<1>();
      pin_tiles(dk);
      release(Smem::Q_EMPTY + 8 * q.stage);
      wgmma_wait<0>();
      pin_dq(), release_other(), add_dq();
    } else {
      wgmma_wait<1>();
      pin_dq(), add_dq();
      wgmma_wait<0>();
      pin_tiles(dk);
      release(Smem::Q_EMPTY + 8 * q.stage);
    }
    next_stage();
  }
  // PAIRED: the other block's dS is read no more.
  __device__ __forceinline__ void release_other() const {
    if (lane == 0) mbarrier_arrive_cluster(in_other(Smem::OTHER_EMPTY + 8 * score_stage));
  }
  // BY_PRODUCTS: what `scores_to_shared` wrote, of the same lane.
  __device__ __forceinline__ void read_probabilities() {
    const int row = lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
    const uint32_t address = smem_address + Smem::P + row * 128 + (column ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / 2; i += 8) {
      uint32_t pairs[4];
      if constexpr (DKV_BY_DIMS) ldmatrix_x4(pairs, rows_address(Smem::P, i));
      else ldmatrix_x4_trans(pairs, address + i * 2 * 128);
#pragma unroll
      for (int e = 0; e < 8; ++e) s[i + e] = to_float(Element{uint16_t(pairs[e / 2] >> e % 2 * 16)});
    }
  }
  __device__ __forceinline__ void next_stage() {
    q.advance();
    if constexpr (DO_STAGES == Q_STAGES) d.stage = q.stage, d.parity = q.parity;  // in the same registers
    else d.advance();
    next_tile();
  }
  __device__ __forceinline__ void next_tile() {
    if constexpr (ONE_LAUNCH) done += BLOCK_M;
    if (DS_STAGES == 1 || ++score_stage == DS_STAGES) score_stage = 0, ds_parity ^= 1;
    walk.advance(block);
  }
  // LISTED: what the producer says of the tile in the ring.
  __device__ __forceinline__ ToldTile::Word told() const {
    return *reinterpret_cast<const ToldTile::Word*>(smem + Smem::TOLD + 8 * q.stage);
  }
  __device__ __forceinline__ void take_tile() {
    if constexpr (BlockStates::LISTED) walk.take(told());
  }
  // Begins to load the bits of that tile, if it is PARTIAL and there are any.
  __device__ __forceinline__ void load_seen() {
    if constexpr (BlockStates::LISTED) {
      ToldTile next;
      next.take(told());
      if (next.partial && block.states.packed())
        block.states.load_seen(seen, block.batch, next.head, lane_key, next.tile * BLOCK_M + dims * SCORE_QUERIES,
                               lane);
    }
  }
  // Probabilities of a tile whose scores are there; then dPᵀ is too.
  __device__ __forceinline__ void score_tile() {
    probabilities();
    if constexpr (!P_IN_REGISTERS) {
      if constexpr (DS_STAGES == 1) {
        named_barrier_sync<128 * WARPGROUPS>(PROBABILITIES);  // no product reads the last P any more
      }
      scores_to_shared(s, Smem::P + score_stage * Smem::SCORE_TILE_BYTES);
      fence_proxy_async();
      named_barrier_sync<128 * WARPGROUPS>(PROBABILITIES);
    }
    if constexpr (TERMS_EARLY) load_terms(deltas());
    wgmma_wait<0>();
    pin_registers(dp);
    if constexpr (!TERMS_EARLY && !DV_LAST) load_terms(deltas());
  }
  __device__ __forceinline__ void gradients_to_shared() {
    if constexpr (DS_STAGES == 1 && !BY_PRODUCTS) {
      named_barrier_sync<128 * WARPGROUPS>(SCORES);  // no product reads the last dS any more
    }
    scores_to_shared(dp, Smem::DS + score_stage * Smem::SCORE_TILE_BYTES);
    if constexpr (PAIRED) send_gradients();
    if constexpr (DV_LAST) multiply_dv();
    fence_proxy_async();
    if constexpr (OWN_KEYS_FIRST) __syncwarp(), release(scores_of(warpgroup));
    else named_barrier_sync<128 * WARPGROUPS>(SCORES);
  }
  // ---- scores

  // Where those of the tile at hand lie.
  __device__ __forceinline__ int log_sums() const {
    return alone() ? Smem::TERMS + 4 * done : Smem::LOG_SUMS + q.stage * BLOCK_M * 4;
  }
  __device__ __forceinline__ int deltas() const {
    return alone() ? Smem::TERMS + 4 * (TERM_QUERIES + done) : Smem::DELTAS + d.stage * BLOCK_M * 4;
  }
  // Terms of queries 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of sixteen, which lie side by side (row_terms.cuh). DKV_BY_DIMS: g
  // and g + 8 of the warp's.
  __device__ __forceinline__ void read_terms(int place, int sixteen) {
    if constexpr (DKV_BY_DIMS) {
      const float* of_row = reinterpret_cast<const float*>(smem + place) + warp * 16 + lane / 8 * 4 + lane / 4 % 2;
      if (sixteen == 0) terms_of_lane[0] = of_row[0], terms_of_lane[1] = of_row[2];
      return;
    }
    const int at = dims * SCORE_COLUMNS + sixteen * 16 + lane % 4 * 4;
    const float4 four = *reinterpret_cast<const float4*>(smem + place + 4 * at);
    terms_of_lane[4 * sixteen] = four.x, terms_of_lane[4 * sixteen + 1] = four.y;
    terms_of_lane[4 * sixteen + 2] = four.z, terms_of_lane[4 * sixteen + 3] = four.w;
  }
  // Those of all queries. Beside products under way they are read no later: the compiler would have these wait in turn
  // (ptxas C7512).
  __device__ __forceinline__ void load_terms(int place) {
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / 16; ++i) { read_terms(place, i); }
  }
  __device__ __forceinline__ int first_query() const { return walk.tile * BLOCK_M + dims * SCORE_QUERIES; }
  __device__ __forceinline__ int lane_query() const {  // of this lane's first accumulator
    return first_query() + (DKV_BY_DIMS ? warp * 16 + lane / 4 : lane % 4 * 2);
  }
  // Of accumulator `i` of this lane.
  static __device__ __forceinline__ int row_of(int i) { return i / 2 % 2 * 8; }
  static __device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + i % 2; }
  static __device__ __forceinline__ int term_of(int i) { return DKV_BY_DIMS ? i / 2 % 2 : i / 4 * 2 + i % 2; }
  __device__ __forceinline__ int query_of(int i) const {
    return lane_query() + (DKV_BY_DIMS ? row_of(i) : column_of(i));
  }
  __device__ __forceinline__ int key_of(int i) const { return lane_key + (DKV_BY_DIMS ? column_of(i) : row_of(i)); }
  // What variants make of the products, and by what their gradients pass.
  __device__ __forceinline__ void change_scores() {
    const Gradient gradient(variant, work.sequence_number, walk.head, mask.seqlen_q, mask.seqlen_k);
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / 2; i += 8) {
      float bias[8];
      if constexpr (BIAS) read_bias(bias, i / 8);
#pragma unroll
      for (int e = i; e < i + 8; ++e) {
        const float factor = gradient.change(s[e], query_of(e), key_of(e), BIAS ? bias[e - i] : 0.f);
        if constexpr (FACTORS > 1) factors[e] = factor;
      }
    }
  }
  // Of the accumulators of sixteen queries.
  __device__ __forceinline__ void read_bias(float (&bias)[8], int sixteen) const {
    const int tile = Smem::BIAS_TILE + (q.stage * KEY_GROUPS + keys) * Smem::BIAS_GROUP_BYTES;
    const int row = dims * SCORE_COLUMNS + sixteen * 16 + lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
    uint32_t pairs[4];  // queries of eight: of keys g, of keys g + 8; then the next eight
    ldmatrix_x4_trans(pairs, smem_address + tile + row * 128 + (column ^ row % 8) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bias[2 * i] = to_float(Element{uint16_t(pairs[i])}),
               bias[2 * i + 1] = to_float(Element{uint16_t(pairs[i] >> 16)});
  }
  // Of a probability, or the gradient of its score, which `score` is.
  __device__ __forceinline__ void apply_factor(float& x, float score, int i) const {
    if constexpr (FACTORS == 1) x *= Gradient::factor_of(score);
    else if (!Gradient::MAY_BE_NONE || x != 0.f) x *= factors[i];
  }
  __device__ __forceinline__ void add_to_bias() const {
    float* head_gmem =
        bias_sums.gmem + block.batch * bias_sums.batch_stride + walk.head * bias_sums.head_stride + lane_key;
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / 2; ++i) {
      const int query = query_of(i), key = key_of(i);
      if (query < mask.seqlen_q && key < mask.seqlen_k)
        red_add(head_gmem + query * bias_sums.row_stride + (key - lane_key), dp[i]);
    }
  }
  // This warpgroup's part of the tile of dS, rounded, eight keys of a query at a time.
  __device__ __forceinline__ void add_rows_to_bias() const {
    const int tile = Smem::DS + score_stage * Smem::SCORE_TILE_BYTES + keys * Smem::SCORE_GROUP_BYTES;
    const int chunk = lane % 8, key = block.first_key + keys * 64 + chunk * 8;
    const bool wide = bias_sums.row_stride % 4 == 0 && key + 8 <= mask.seqlen_k;
    float* key_gmem = bias_sums.gmem + block.batch * bias_sums.batch_stride + walk.head * bias_sums.head_stride + key;
#pragma unroll 2
    for (int i = warp * 4 + lane / 8; i < SCORE_COLUMNS; i += 16) {
      const int row = dims * SCORE_COLUMNS + i, query = walk.tile * BLOCK_M + row;
      if (query >= mask.seqlen_q) break;
      const uint4 eight = *reinterpret_cast<const uint4*>(smem + tile + row * 128 + (chunk ^ row % 8) * 16);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
      float x[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = to_float(Element{uint16_t(pairs[e / 2] >> e % 2 * 16)});
      float* to_gmem = key_gmem + query * bias_sums.row_stride;
      if (wide) {
        red_add_v4(to_gmem, x[0], x[1], x[2], x[3]);
        red_add_v4(to_gmem + 4, x[4], x[5], x[6], x[7]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (key + e < mask.seqlen_k) red_add(to_gmem + e, x[e]);
      }
    }
  }
  // Of PARTIAL blocks by bits or the predicate, else behind the last key.
  __device__ __forceinline__ void mask_listed(int query) {
    using Listed = ListedTiles<SCORE_COLUMNS>;
    if (walk.partial && block.states.packed()) {
      Listed::mask_unseen(s, seen);
    } else if (walk.partial) {
      mask_transposed(s, mask, lane_key, query, lane);
      Listed::template mask_partial<true>(s, variant, block.batch, walk.head, lane_key, query + lane % 4 * 2);
    } else if (block.first_key + keys * 64 + 64 > mask.seqlen_k) {
      mask_transposed(s, QueryMask<false, false, false>(mask.seqlen_q, mask.seqlen_k, {}), lane_key, query, lane);
    }
  }
  __device__ __forceinline__ void mask_tile(int query) {
    if constexpr (DKV_BY_DIMS) mask_scores(s, block.first_key, mask.keys_from(lane_query(), 0), lane);
    else mask_transposed(s, mask, lane_key, query, lane);
  }
  // P = 2^(S · scale - lse), 0 where a query does not see a key.
  __device__ __forceinline__ void probabilities() {
    const int query = first_query();
    if constexpr (Variant::ANY) change_scores();
    if constexpr (BlockStates::LISTED) mask_listed(query);
    else if (query < see_all.first || (Mask::WINDOW && query + SCORE_QUERIES > see_all.end)) mask_tile(query);
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / 2; i += 8) {
      if constexpr (!TERMS_EARLY) read_terms(log_sums(), i / 8);
      if constexpr (FACTORS_IN_P) {
#pragma unroll
        for (int e = i; e < i + 8; e += 2) {
          const float low = s[e], high = s[e + 1];
          s[e] = probability(low, e), s[e + 1] = probability(high, e + 1);
          p[e / 8][e / 2 % 4] = pack2<Element>(s[e], s[e + 1]);
          apply_factor(s[e], low, e), apply_factor(s[e + 1], high, e + 1);
        }
      } else {
#pragma unroll
        for (int e = i; e < i + 8; ++e) s[e] = probability(s[e], e);
      }
    }
    if constexpr (P_IN_REGISTERS && !FACTORS_IN_P) {
#pragma unroll
      for (int i = 0; i < SCORE_COLUMNS / 4; ++i) p[i / 4][i % 4] = pack2<Element>(s[2 * i], s[2 * i + 1]);
    }
  }
  __device__ __forceinline__ float probability(float score, int i) const {
    return exp2_approx(fmaf(score, softmax_scale_log2, -terms_of_lane[term_of(i)]));
  }
  // dS = P · (dP - delta), without the scale that dQ and dK are multiplied by at last.
  __device__ __forceinline__ void score_gradients() {
#pragma unroll
    for (int i = 0; i < SCORE_COLUMNS / 2; ++i) {
      if (!TERMS_EARLY && DV_LAST && i % 8 == 0) read_terms(deltas(), i / 8);
      dp[i] = s[i] * (dp[i] - terms_of_lane[term_of(i)]);
    }
    if constexpr (BIAS_GRADIENT && !BIAS_FROM_SHARED) add_to_bias();
    if constexpr (Gradient::FACTORED && !FACTORS_IN_P) {
#pragma unroll
      for (int i = 0; i < SCORE_COLUMNS / 2; ++i) apply_factor(dp[i], 0.f, i);
    }
    if constexpr (DS_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < SCORE_COLUMNS / 4; ++i) ds[i / 4][i % 4] = pack2<Element>(dp[2 * i], dp[2 * i + 1]);
    }
  }
  // [BLOCK_M queries, 64 keys] with the 128-byte swizzle, as wgmma reads them.
  __device__ __forceinline__ void scores_to_shared(const float (&x)[SCORE_COLUMNS / 2], int place) const {
    if constexpr (DKV_BY_DIMS) {
#pragma unroll
      for (int i = 0; i < SCORE_COLUMNS / 2; i += 8)
        stmatrix_x4(rows_address(place, i), pack2<Element>(x[i], x[i + 1]), pack2<Element>(x[i + 2], x[i + 3]),
                    pack2<Element>(x[i + 4], x[i + 5]), pack2<Element>(x[i + 6], x[i + 7]));
    } else {
      turned_to_shared(x, place + keys * Smem::SCORE_GROUP_BYTES, dims * SCORE_COLUMNS, 1.f);
    }
  }
  // Columns become rows, from `first` on.
  template <int FLOATS>
  __device__ __forceinline__ void turned_to_shared(const float (&x)[FLOATS], int place, int first, float scale) const {
    const int row = first + lane / 16 * 8 + lane % 8, column = 2 * warp + lane / 8 % 2;
    const uint32_t address = smem_address + place + row * 128 + (column ^ row % 8) * 16;
    auto pair = [&](int i) { return pack2<Element>(x[i] * scale, x[i + 1] * scale); };
#pragma unroll
    for (int i = 0; i < FLOATS; i += 8)
      stmatrix_x4_trans(address + i * 2 * 128, pair(i), pair(i + 2), pair(i + 4), pair(i + 6));
  }
  // DKV_BY_DIMS: of sixteen keys, from accumulator `i` on, where a lane's row of 16 bytes lies.
  __device__ __forceinline__ uint32_t rows_address(int place, int i) const {
    const int row = warp * 16 + lane % 16, eight = i / 4 + lane / 16;
    return smem_address + place + eight / 8 * Smem::SCORE_GROUP_BYTES + row * 128 + (eight % 8 ^ row % 8) * 16;
  }

  // PAIRED: this warp's part of dS to the other block, which adds it to its part of dQ.
  __device__ __forceinline__ void send_gradients() const {
    const int tile = score_stage * Smem::SCORE_TILE_BYTES + keys * Smem::SCORE_GROUP_BYTES;
    const uint32_t full = in_other(Smem::OTHER_FULL + 8 * score_stage), to = in_other(Smem::OTHER_DS + tile);
    if (threadIdx.x == 128 * BY_PRODUCTS)
      mbarrier_arrive_expect_tx(smem_address + Smem::OTHER_FULL + 8 * score_stage, Smem::SCORE_TILE_BYTES);
    __syncwarp();  // all lanes have written
    // The other block has read what was sent there before.
    mbarrier_wait_cluster(smem_address + Smem::OTHER_EMPTY + 8 * score_stage, ds_parity ^ 1);
#pragma unroll
    for (int i = lane; i < SCORE_COLUMNS * 2; i += 32) {
      const int row = dims * SCORE_COLUMNS + i / 2, at = row * 128 + ((2 * warp + i % 2) ^ row % 8) * 16;
      const float4 eight = *reinterpret_cast<const float4*>(smem + Smem::DS + tile + at);
      store_async_16(to + at, full, eight.x, eight.y, eight.z, eight.w);
    }
    if (lane == 0) mbarrier_arrive_cluster(full);
  }

  // ---- results

  // This warp's part of dQ, which is whole, to its rows. DQ_BY_DIMS: lanes of dimensions g and g + 1 exchange, and the
  // first has both of query 2 t then, the other of the next query.
  __device__ __forceinline__ void write_dq() const {
    const int odd = DQ_BY_DIMS ? lane / 4 % 2 : 0,
              sixteen = DQ_BY_DIMS ? 0 : warpgroup / SUM_TILES_ALONG * 64 + warp * 16;
    const int query = walk.tile * BLOCK_M + (DQ_BY_DIMS ? lane % 4 * 2 + odd : sixteen + lane / 4);
    const int column = DQ_BY_DIMS ? warpgroup * 64 + warp * 16 + lane / 4 - odd
                                  : warpgroup % SUM_TILES_ALONG * DQ_COLUMNS + lane % 4 * 2;
    Element* row_gmem = rows.dq_gmem + rows.dq.first(block.batch, walk.head, query) + column;
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 2; i += 2) {
      const int eight = i / 4 * 8, half = i / 2 % 2 * 8;
      const int below = DQ_BY_DIMS ? eight : half, beside = DQ_BY_DIMS ? half : eight;
      float low = dq[i], high = dq[i + 1];
      if constexpr (DQ_BY_DIMS) {
        const float other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 4);
        low = odd ? other : low, high = odd ? high : other;
      }
      if (column + beside < HEAD_DIM && query + below < mask.seqlen_q)
        *reinterpret_cast<uint32_t*>(row_gmem + below * rows.dq.row + beside) =
            pack2<Element>(low * rows.softmax_scale, high * rows.softmax_scale);
    }
  }
  // WHOLE_HEADS: the sums of the tile of dQ at hand, of which a thread has the same numbers for each tile of keys: so
  // it stores those of the first, adds, and behind the last one has them back.
  __device__ __forceinline__ float* own_sums() const {
    const int64_t head = int64_t(blockIdx.x) * group + walk.head - block.kv_head * group;
    return dq_sums_gmem + (head * terms.tiles + walk.tile) * Sums::FLOATS + warpgroup * Sums::TILE_FLOATS +
           warp * Sums::WARP_FLOATS + lane * 4;
  }
  // Whether no tile of keys behind this one sees the tile of queries at hand.
  __device__ __forceinline__ bool is_last() const {
    const int next = block.first_key + BLOCK_N;
    return next >= mask.seqlen_k || mask.first_query(next) / BLOCK_M > walk.tile;
  }
  // Begins to load them, if they are wanted, to where scores were.
  __device__ __forceinline__ void load_own_sums() {
    if (block.key_tile == 0 || !is_last()) return;
    const float* sums = own_sums();
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 2; i += 4) {
      const float4 four = load_relaxed(sums + i * 32);
      s[i] = four.x, s[i + 1] = four.y, s[i + 2] = four.z, s[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ void sum_own_dq() {
    if (is_last()) {
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 2; ++i) dq[i] += block.key_tile > 0 ? s[i] : 0.f;
      return write_dq();
    }
    float* sums = own_sums();
    if (block.key_tile > 0) {
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 2; i += 4) red_add_v4(sums + i * 32, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 2; i += 4)
        *reinterpret_cast<float4*>(sums + i * 32) = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
  }
  // This warp's part of dQ to its sums (`query_sums.cuh`).
  __device__ __forceinline__ void add_dq() {
    if (alone()) return write_dq();
    if constexpr (WHOLE_HEADS) return sum_own_dq();
    const int64_t tile = terms.tile(work, walk.head, walk.tile);
    float *of_tile = dq_sums_gmem + tile * Sums::FLOATS, *share_sums = of_tile + share_of_dq(warpgroup, warp);
    float* sums = of_tile + (block.first_part() + warpgroup) * Sums::TILE_FLOATS + warp * Sums::WARP_FLOATS;
    if constexpr (DQ_BY_WARP) {
      const int group = Smem::DQ + warpgroup * Smem::DQ_GROUP_BYTES, place = group + warp * Smem::DQ_WARP_BYTES;
      const int share_place = group + 4 * Smem::DQ_WARP_BYTES + warp * Smem::DQ_SHARE_BYTES;
      mbarrier_wait(smem_address + Smem::DQ_EMPTY + 8 * warpgroup, (DS_STAGES == 2 ? score_stage : ds_parity) ^ 1);
      auto copy = [&](const auto& x, int to, int count) {
#pragma unroll
        for (int i = 0; i < count; i += 4)
          *reinterpret_cast<float4*>(smem + to + i * 128 + lane * 16) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
      };
      copy(dq, place, DQ_COLUMNS / 2);
      if constexpr (DQ_SHARE > 0) copy(dq_share, share_place, DQ_SHARE / 2);
      fence_proxy_async();
      __syncwarp();  // all lanes have written
      release(Smem::DQ_FULL + 8 * warpgroup);
    } else {
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 2; i += 4) {
        if (HEAD_DIM % 64 == 0 || Sums::needed<HEAD_DIM>(warpgroup * 4 + warp, i / 4, BLOCK_M))
          red_add_v4(sums + i * 32 + lane * 4, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
      }
      if constexpr (DQ_SHARE > 0) {
#pragma unroll
        for (int i = 0; i < DQ_SHARE / 2; i += 4)
          red_add_v4(share_sums + i * 32 + lane * 4, dq_share[i], dq_share[i + 1], dq_share[i + 2], dq_share[i + 3]);
      }
    }
  }
  // The warpgroup's part of the DIM columns of dK or dV, by way of shared memory. `to_gmem` is the block's first row.
  template <int DIM, int TILES, int FLOATS>
  __device__ __forceinline__ void to_global(const float (&x)[TILES][FLOATS], int place, Element* to_gmem,
                                            int64_t row_stride, float scale) const {
    constexpr int COLUMNS = 2 * FLOATS;
    if constexpr (DKV_BY_DIMS) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) turned_to_shared(x[tile], place + tile * (BLOCK_N * 128), 0, scale);
      named_barrier_sync<128>(OWN + warpgroup);
#pragma unroll
      for (int row = warp * 16; row < BLOCK_N; row += 64)
        rows_to_global<DIM, BLOCK_N>(smem + place, to_gmem + row * row_stride, row_stride,
                                     mask.seqlen_k - block.first_key - row, row / 16, lane);
      return;
    }
    constexpr int BYTES = (COLUMNS + 63) / 64 * 64 * 128;
    const float factor[2] = {scale, scale};
    const int at = place + (BY_PRODUCTS ? keys : warpgroup) * (CLAIMED ? Smem::RESULT_BYTES : BYTES);
    output_to_shared<Element>(x[0], factor, smem_address + at, warp, lane);
    __syncwarp();  // all rows of the warp are written
    const int row = keys * 64 + warp * 16;
    rows_to_global<COLUMNS>(smem + at, to_gmem + row * row_stride + dims * COLUMNS, row_stride,
                            mask.seqlen_k - block.first_key - row, warp, lane);
  }
};
