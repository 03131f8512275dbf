// shared_layout.cuh: the shared memory of a block of backward_wgmma, in bytes from its start: a tile of K and of V,
// rings of tiles of Q and dO, tiles of dS and of P, of the bias, what is added to dQ, terms of the queries, barriers.
// Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/copy/tensor_tile.cuh"

struct Smem {
  static constexpr int Q_TILE_BYTES = Tiles::bytes(BLOCK_M), DO_TILE_BYTES = ValueTiles::bytes(BLOCK_M);
  static constexpr int SCORE_GROUP_BYTES = BLOCK_M * 128;  // BLOCK_M queries × 64 keys
  static constexpr int SCORE_TILE_BYTES = KEY_GROUPS * SCORE_GROUP_BYTES;
  static constexpr int K = 0;
  static constexpr int V = K + Tiles::bytes(BLOCK_N);
  static constexpr int Q = V + ValueTiles::bytes(BLOCK_N);     // [Q_STAGES]
  static constexpr int DO = Q + Q_STAGES * Q_TILE_BYTES;       // [DO_STAGES]
  static constexpr int DS = DO + DO_STAGES * DO_TILE_BYTES;    // [DS_STAGES]
  static constexpr int P = DS + DS_STAGES * SCORE_TILE_BYTES;  // [P_STAGES]
  static constexpr int P_STAGES = BY_PRODUCTS ? 1 : P_IN_REGISTERS ? 0 : DS_STAGES;
  // PAIRED: dS of the other block's keys, and half of the columns of these keys
  static constexpr int OTHER_DS = P + P_STAGES * SCORE_TILE_BYTES;  // [DS_STAGES]
  static constexpr int OTHER_K = OTHER_DS + (PAIRED ? DS_STAGES * SCORE_TILE_BYTES : 0);
  static constexpr int BIAS_GROUP_BYTES = BIAS ? BLOCK_M * 128 : 0;                     // of 64 keys
  static constexpr int BIAS_TILE = OTHER_K + (PAIRED ? Tiles::bytes(BLOCK_N) / 2 : 0);  // [Q_STAGES][KEY_GROUPS]
  static constexpr int DQ = BIAS_TILE + Q_STAGES * KEY_GROUPS * BIAS_GROUP_BYTES;       // [DQ_GROUPS][4 warps]
  static constexpr int DQ_WARP_BYTES = DQ_BY_WARP ? 4 * Sums::WARP_FLOATS : 0;
  static constexpr int DQ_SHARE_BYTES = DQ_BY_WARP ? 4 * 16 * DQ_SHARE : 0;  // of a warp, behind those of the warpgroup
  static constexpr int DQ_GROUP_BYTES = 4 * (DQ_WARP_BYTES + DQ_SHARE_BYTES);
  static constexpr int LOG_SUMS = DQ + DQ_GROUPS * DQ_GROUP_BYTES;  // [Q_STAGES][BLOCK_M]
  static constexpr int DELTAS = LOG_SUMS + Q_STAGES * BLOCK_M * 4;  // [DO_STAGES][BLOCK_M]
  static constexpr int TERMS = DELTAS + DO_STAGES * BLOCK_M * 4;    // ONE_LAUNCH: log-sums, deltas: [2][TERM_QUERIES]
  static constexpr int K_FULL = TERMS + (ONE_LAUNCH ? 8 * TERM_QUERIES : 0);
  static constexpr int V_FULL = K_FULL + 8;
  static constexpr int Q_FULL = V_FULL + 8;                 // [Q_STAGES]
  static constexpr int Q_EMPTY = Q_FULL + 8 * Q_STAGES;     // [Q_STAGES]
  static constexpr int DO_FULL = Q_EMPTY + 8 * Q_STAGES;    // [DO_STAGES]
  static constexpr int DO_EMPTY = DO_FULL + 8 * DO_STAGES;  // [DO_STAGES]
  static constexpr int DQ_FULL = DO_EMPTY + 8 * DO_STAGES;  // [DQ_GROUPS]
  static constexpr int DQ_EMPTY = DQ_FULL + (DQ_BY_WARP ? 8 * DQ_GROUPS : 0);
  static constexpr int TOLD = DQ_EMPTY + (DQ_BY_WARP ? 8 * DQ_GROUPS : 0);  // [Q_STAGES] `ToldTile::Word`
  static constexpr int K_EMPTY = TOLD + (BlockStates::LISTED ? 8 * Q_STAGES : 0);
  static constexpr int CLAIM = K_EMPTY + 8;  // [2] of the tile of keys at hand and the next one: its number, or -1
  static constexpr int DS_FULL = K_EMPTY + (CLAIMED ? 16 : 0);  // OWN_KEYS_FIRST: [2 stages][WARPGROUPS]
  static constexpr int OTHER_FULL = DS_FULL + (OWN_KEYS_FIRST ? 16 * WARPGROUPS : 0);  // PAIRED: [DS_STAGES]
  static constexpr int OTHER_EMPTY = OTHER_FULL + (PAIRED ? 8 * DS_STAGES : 0);        // [DS_STAGES]
  static constexpr int BYTES = OTHER_EMPTY + (PAIRED ? 8 * DS_STAGES : 0);
  // CLAIMED: where dK, then dV become rows, while the next K and V come: from DS on.
  static constexpr int RESULT_BYTES = ((DK_COLUMNS > DV_COLUMNS ? DK_COLUMNS : DV_COLUMNS) + 63) / 64 * 64 * 128;
  static_assert(!CLAIMED || (QUERY_SPLIT > 1 && !SPLIT_LAST) || DS + WARPGROUPS * RESULT_BYTES <= BIAS_TILE,
                "room for results");

  // By one thread: "full" gets an arrival for each copy, of a tile of queries, its terms and its bias, "empty" one of
  // each warp that reads. CLAIMED: of K and V together one "empty", which the warp that adds dQ has a part in, as it
  // reads what is claimed. Of dQ, "full" gets one of each warp that wrote, "empty" one of the warp that adds.
  static __device__ __forceinline__ void init_barriers(uint32_t smem_address) {
    auto init = [&](int first, int count, int arrivals) {
#pragma unroll
      for (int i = 0; i < count; ++i) mbarrier_init(smem_address + first + 8 * i, arrivals);
    };
    init(K_FULL, 1, 1 + PAIRED), init(V_FULL, 1, 1), init(Q_FULL, Q_STAGES, 2 + BIAS), init(DO_FULL, DO_STAGES, 2);
    init(Q_EMPTY, Q_STAGES, 4 * WARPGROUPS), init(DO_EMPTY, DO_STAGES, 4 * WARPGROUPS);
    if constexpr (DQ_BY_WARP) init(DQ_FULL, DQ_GROUPS, 4), init(DQ_EMPTY, DQ_GROUPS, 1);
    if constexpr (OWN_KEYS_FIRST) init(DS_FULL, 2 * WARPGROUPS, 4);
    if constexpr (PAIRED)
      init(OTHER_FULL, DS_STAGES, 1 + 4 * WARPGROUPS / (1 + BY_PRODUCTS)), init(OTHER_EMPTY, DS_STAGES, 4 * WARPGROUPS);
    if constexpr (CLAIMED) init(K_EMPTY, 1, 4 * WARPGROUPS + DQ_BY_WARP);
    mbarrier_init_fence();
  }
};
