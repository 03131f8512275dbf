// shared_layout.cuh: the shared memory of a block of latent_columns, in bytes from its start: tiles of Q, in whose
// place O comes later; the ring of K; of a cache of 8 bits the ring of what is loaded; P; scales of what is loaded;
// maxima, then sums, of each warp; barriers. Needs the constants of latent_columns.cu.j2.
#include "device/copy/tensor_tile.cuh"
#include "device/ptx/mbarrier.cuh"

// Q of the next tile of rows comes while this one's keys are used. Of 8 bits its room is for keys that are under way.
constexpr int Q_STAGES = EIGHT_BITS ? 1 : 2;

struct Smem {
  static constexpr int Q_TILE_BYTES = Tiles::bytes(BLOCK_M), K_TILE_BYTES = Tiles::bytes(BLOCK_N);
  static constexpr int K = Q_STAGES * Q_TILE_BYTES;               // [STAGES]
  static constexpr int LOADED_TILES = K + STAGES * K_TILE_BYTES;  // [LOADED]
  static constexpr int LOADED_BYTES = EIGHT_BITS ? LoadedTiles::bytes(LOAD_KEYS) : 0;
  static constexpr int P = LOADED_TILES + LOADED * LOADED_BYTES;                     // [BLOCK_M, BLOCK_N]
  static constexpr int SCALES = P + BLOCK_M * BLOCK_N * 2;                           // [LOADED, LOAD_KEYS, 4] floats
  static constexpr int WARPS = SCALES + (EIGHT_BITS ? LOADED * LOAD_KEYS * 16 : 0);  // [4, BLOCK_M] floats
  static constexpr int Q_FULL = WARPS + 4 * BLOCK_M * 4;                             // [Q_STAGES]
  static constexpr int Q_EMPTY = Q_FULL + 8 * Q_STAGES;                              // [Q_STAGES]
  static constexpr int K_FULL = Q_EMPTY + 8 * Q_STAGES;                              // [STAGES]
  static constexpr int K_EMPTY = K_FULL + 8 * STAGES;                                // [STAGES]
  static constexpr int LOADED_FULL = K_EMPTY + 8 * STAGES;                           // [LOADED]
  static constexpr int LOADED_EMPTY = LOADED_FULL + 8 * LOADED;                      // [LOADED]
  static constexpr int BYTES = EIGHT_BITS ? LOADED_EMPTY + 8 * LOADED : LOADED_FULL;

  // By one thread: "full" gets its arrivals, "empty" one of each warp that multiplies, or thread that converts.
  static __device__ __forceinline__ void init_barriers(uint32_t smem_address) {
    for (int i = 0; i < Q_STAGES; ++i)
      mbarrier_init(smem_address + Q_FULL + 8 * i, 1), mbarrier_init(smem_address + Q_EMPTY + 8 * i, 4);
    constexpr int COPIES = APART ? 2 : 1;  // of a tile
    for (int i = 0; i < STAGES; ++i)
      mbarrier_init(smem_address + K_FULL + 8 * i, EIGHT_BITS ? CONVERTERS / 32 : COPIES),
          mbarrier_init(smem_address + K_EMPTY + 8 * i, 4);
    for (int i = 0; EIGHT_BITS && i < LOADED; ++i)
      mbarrier_init(smem_address + LOADED_FULL + 8 * i, COPIES + LOAD_KEYS),  // and of lanes with scales
          mbarrier_init(smem_address + LOADED_EMPTY + 8 * i, CONVERTERS);
    mbarrier_init_fence();
  }
};
static_assert(Smem::BYTES == SMEM_BYTES, "Python and CUDA disagree");
