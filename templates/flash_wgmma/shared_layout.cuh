// shared_layout.cuh: the shared memory of a block of flash_wgmma, in bytes from its start: tiles of Q, the rings of K
// and V, O_CHUNKS places for 64 columns of O per warpgroup, results of the other blocks of a cluster, then barriers.
// Without O_CHUNKS, O takes the place of Q, which is wide enough for both.
#include "device/ptx/element.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_words.cuh"
#include "device/copy/tensor_tile.cuh"
#include "flash_wgmma/key_split.cuh"

template <class Operands, int VALUE_DIM, int WARPGROUPS, int BLOCK_N, int STAGES, int O_CHUNKS, bool SUM_IN_SHARED,
          int SLOTS, int SLOT_PIECES, int TILE_WORDS, int TOLD_WORDS, int ORDER_WORDS, int KEY_BYTES>
struct SharedLayout {
  static constexpr int ROW_COLUMNS = Operands::ROW_COLUMNS;
  static constexpr int QUERY_COLUMNS = Operands::QUERY_COLUMNS;
  static constexpr int WIDEST = O_CHUNKS || SUM_IN_SHARED || QUERY_COLUMNS > VALUE_DIM ? QUERY_COLUMNS : VALUE_DIM;
  static constexpr int Q_PLACE_BYTES = TensorTile<WIDEST>::bytes(64);  // of one warpgroup
  static constexpr int K_TILE_BYTES = TensorTile<ROW_COLUMNS>::bytes(BLOCK_N);
  static constexpr int V_TILE_BYTES = Operands::VALUE_BYTES;
  static constexpr int LOADED_TILE_BYTES = Operands::LoadedTiles::bytes(BLOCK_N);  // of V as it comes
  static constexpr int O_TILE_BYTES = TensorTile<VALUE_DIM>::bytes(64), OF_SUMS = VALUE_DIM / 2 * 128 * 4;
  // Of O in fp32, of one warpgroup; then O takes their place.
  static constexpr int SUM_BYTES = !SUM_IN_SHARED ? 0 : OF_SUMS > O_TILE_BYTES ? OF_SUMS : O_TILE_BYTES;
  static constexpr int O_CHUNK_BYTES = 64 * 128, O_BYTES = SUM_IN_SHARED ? SUM_BYTES
                                                           : O_CHUNKS    ? O_CHUNKS * O_CHUNK_BYTES
                                                                         : Q_PLACE_BYTES;  // of one warpgroup
  static constexpr int SLOT_BYTES = WARPGROUPS * SLOT_PIECES * 128 * 16;                // the result of a block
  static constexpr int K = WARPGROUPS * Q_PLACE_BYTES;                                  // [STAGES] tiles
  static constexpr bool IN_KEYS = Operands::VALUES_IN_KEYS;                             // V is no ring of its own
  static constexpr int V = IN_KEYS ? K : K + STAGES * K_TILE_BYTES;                     // [STAGES]
  static constexpr bool TURNS = Operands::TRANSPOSERS > 0;                              // V comes to a ring of its own
  static constexpr int LOADED = TURNS ? V + STAGES * V_TILE_BYTES : V;                  // [STAGES]
  static constexpr bool CONVERTS = Operands::CONVERTS;                                  // K too
  static constexpr int LOADED_END = LOADED + STAGES * LOADED_TILE_BYTES;
  static constexpr int LOADED_KEYS = CONVERTS ? LOADED_END : K;  // [STAGES]
  static constexpr int HANDED =                                  // what warpgroups hand over
      CONVERTS ? LOADED_KEYS + STAGES * Operands::LoadedKeys::bytes(BLOCK_N) : LOADED_END;
  static constexpr int RINGS_END = HANDED + Operands::HANDED_BYTES;
  static constexpr int O = O_CHUNKS || SUM_IN_SHARED ? RINGS_END : 0;  // [WARPGROUPS]
  static constexpr int SUMS = RINGS_END;                               // [WARPGROUPS], before O
  // Results of the blocks of a cluster: [SLOTS][WARPGROUPS].
  static constexpr int PARTIALS = RINGS_END + WARPGROUPS * (O_CHUNKS * O_CHUNK_BYTES + SUM_BYTES);
  static constexpr int KEY_SCALES = PARTIALS + SLOTS * SLOT_BYTES;  // [WARPGROUPS][2]
  static constexpr int KEY_SCALES_BYTES = KEY_BYTES;
  static constexpr int Q_FULL = KEY_SCALES + 2 * WARPGROUPS * KEY_SCALES_BYTES;                 // [WARPGROUPS] barriers
  static constexpr int Q_EMPTY = Q_FULL + 8 * WARPGROUPS;                                       // [WARPGROUPS]
  static constexpr int K_FULL = Q_EMPTY + 8 * WARPGROUPS;                                       // [STAGES]
  static constexpr int K_EMPTY = K_FULL + 8 * STAGES;                                           // [STAGES]
  static constexpr int V_FULL = IN_KEYS ? K_FULL : K_EMPTY + 8 * STAGES;                        // [STAGES]
  static constexpr int V_EMPTY = V_FULL + 8 * STAGES;                                           // [STAGES]
  static constexpr int LOADED_FULL = TURNS ? V_EMPTY + 8 * STAGES : V_FULL;                     // [STAGES]
  static constexpr int LOADED_EMPTY = TURNS ? LOADED_FULL + 8 * STAGES : V_EMPTY;               // [STAGES]
  static constexpr int KEYS_LOADED_FULL = CONVERTS ? LOADED_EMPTY + 8 * STAGES : K_FULL;        // [STAGES]
  static constexpr int KEYS_LOADED_EMPTY = CONVERTS ? KEYS_LOADED_FULL + 8 * STAGES : K_EMPTY;  // [STAGES]
  static constexpr int PARTIALS_FULL = (CONVERTS ? KEYS_LOADED_EMPTY : LOADED_EMPTY) + 8 * STAGES;
  static constexpr int LAST = PARTIALS_FULL + 8;                // TURNS, [STAGES] words: no more comes here
  static constexpr int TILE = LAST + (TURNS ? 4 * STAGES : 0);  // [2] a tile of rows, as the producer hands it over
  // Row block, head, batch, key tiles; the first query, queries and keys of its sequence. Row block -1: none.
  static constexpr int TILE_BYTES = 4 * TILE_WORDS;
  static constexpr int TOLD = TILE + 2 * TILE_BYTES,
                       TOLD_BYTES = 4 * TOLD_WORDS;         // [STAGES], of a tile of K: its scales
  static constexpr int ORDER = TOLD + STAGES * TOLD_BYTES;  // words: the batches in the order in which they are taken
  static constexpr int BYTES = ORDER + 4 * ORDER_WORDS;

  // By one thread: the instruction takes uniform registers, so lanes in parallel would loop (SASS). "Full" gets one
  // arrival of each thread that copies, which of K and V are COPIERS, "empty" one of each warp that reads; results of
  // other blocks are expected at once.
  template <int COPIERS> static __device__ __forceinline__ void init_barriers(uint32_t smem_address) {
    auto init = [&](int first, int count, int arrivals) {
#pragma unroll
      for (int i = 0; i < count; ++i) mbarrier_init(smem_address + first + 8 * i, arrivals);
    };
    init(Q_FULL, WARPGROUPS, 1), init(Q_EMPTY, WARPGROUPS, 4);
    init(K_FULL, STAGES, CONVERTS ? Operands::MAKERS : COPIERS),
        init(K_EMPTY, STAGES, 4 * WARPGROUPS * Operands::COLUMN_SHARERS);
    if constexpr (!IN_KEYS)
      init(V_FULL, STAGES, TURNS ? Operands::MAKERS : COPIERS), init(V_EMPTY, STAGES, 4 * WARPGROUPS);
    if constexpr (TURNS) {
      init(LOADED_FULL, STAGES, COPIERS), init(LOADED_EMPTY, STAGES, Operands::TRANSPOSERS);
      if constexpr (CONVERTS)
        init(KEYS_LOADED_FULL, STAGES, COPIERS), init(KEYS_LOADED_EMPTY, STAGES, Operands::TRANSPOSERS);
#pragma unroll
      for (int i = 0; i < STAGES; ++i) write_shared_word(smem_address + LAST + 4 * i, 0);
    }
    if (SLOTS > 0) init(PARTIALS_FULL, 1, 1);
    mbarrier_init_fence();
    // Of few rows the first warp alone sends.
    if (SLOTS > 0) mbarrier_arrive_expect_tx(smem_address + PARTIALS_FULL, SLOTS * SLOT_BYTES / (FEW_ROWS ? 4 : 1));
  }
};
