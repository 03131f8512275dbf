// shared_layout.cuh: the shared memory of a block of latent_wgmma, in bytes from its start: Q, in its place later O;
// the ring of K; tiles of P, side by side; for each of them and each row the factor by which O follows its shift; at
// the end the inverse of the row's sum; barriers. Needs the constants of latent_wgmma.cu.j2.
#include "device/copy/tensor_tile.cuh"
#include "device/ptx/mbarrier.cuh"

struct Smem {
  static constexpr int K_TILE_BYTES = Tiles::bytes(BLOCK_N);
  static constexpr int K = Tiles::bytes(64);                                    // [STAGES]
  static constexpr int P = K + STAGES * K_TILE_BYTES;                           // [P_TILES]
  static constexpr int FACTORS = P + TensorTile<P_TILES * BLOCK_N>::bytes(64);  // [P_TILES, 64]
  static constexpr int INVERSES = FACTORS + P_TILES * 64 * 4;                   // [64]
  static constexpr int Q_FULL = INVERSES + 64 * 4;
  static constexpr int K_FULL = Q_FULL + 8;            // [STAGES]
  static constexpr int K_EMPTY = K_FULL + 8 * STAGES;  // [STAGES]
  static constexpr int BYTES = K_EMPTY + 8 * STAGES;

  // By one thread: "full" gets its arrivals, "empty" one of each warp with a part of O.
  static __device__ __forceinline__ void init_barriers(uint32_t smem_address) {
    mbarrier_init(smem_address + Q_FULL, 1);
    for (int i = 0; i < STAGES; ++i)
      mbarrier_init(smem_address + K_FULL + 8 * i, APART ? 2 : 1),
          mbarrier_init(smem_address + K_EMPTY + 8 * i, RELEASING_WARPS);
    mbarrier_init_fence();
  }
};
static_assert(Smem::BYTES == SMEM_BYTES, "Python and CUDA disagree");
