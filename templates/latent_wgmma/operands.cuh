// operands.cuh: what is other than in flash_wgmma where V is the first columns of K and several warpgroups share the
// columns of O. Needs the constants of latent_wgmma.cu.j2.
#include "device/ptx/opaque.cuh"
#include "flash_wgmma/operands.cuh"

struct LatentOperands : SixteenBitOperands<Element, HEAD_DIM, VALUE_DIM, BLOCK_N> {
  static constexpr bool VALUES_IN_KEYS = true;  // a place of K is read until P V is done
  using LoadedTiles = TensorTile<HEAD_DIM>;     // V as it comes
  static constexpr int VALUE_BYTES = LoadedTiles::bytes(BLOCK_N);
  static constexpr int HELPERS = SCORES_ALONE ? 2 : 1;  // warpgroups that have columns of O and no scores
  static constexpr int COLUMN_SHARERS = 2;              // warpgroups with columns of O
  static constexpr int P_TILES = SCORES_ALONE ? 2 : 1;  // of P and factors, in shared memory
  // Tiles of P, side by side; [P_TILES, 64] factors by which O follows the shift; [64] inverse sums.
  static constexpr int FACTORS = TensorTile<P_TILES * BLOCK_N>::bytes(64), INVERSES = FACTORS + P_TILES * 64 * 4;
  static constexpr int HANDED_BYTES = INVERSES + 64 * 4;
};

// Q, of which the first STEPS steps stay in registers.
template <int STEPS> struct MixedRows : RowOperand<HEAD_DIM, false> {
  uint32_t frag[STEPS > 0 ? STEPS : 1][4];
  __device__ __forceinline__ void load(uint32_t tile_smem, int warp, int lane) {
    RowOperand<HEAD_DIM, false>::load(tile_smem, warp, lane);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) this->fragment(frag[step], step, tile_smem, warp, lane);
  }
};
// S = Q Kᵀ, or added to it; `k(step)` is K's descriptor. Sums of 64 bits leave other warpgroups time at the tensor
// cores, low words alone take less of it: which is faster was timed.
template <int FLOATS, int STEPS, class K>
__device__ __forceinline__ void wgmma_qk(float (&s)[FLOATS], MixedRows<STEPS>& q, const K& k, int accumulate) {
  constexpr bool LOW_WORDS = SCORES_AHEAD || 2 * STEPS >= TensorTile<HEAD_DIM>::DIM_STEPS;
  forget_origin(q.descriptor);
  const uint64_t high = q.descriptor >> 32 << 32;
#pragma unroll
  for (int step = 0; step < TensorTile<HEAD_DIM>::DIM_STEPS; ++step) {
    if (step < STEPS) wgmma_qk_registers(s, q.frag[step < STEPS ? step : 0], k(step), accumulate || step > 0);
    else wgmma_qk_shared(s, LOW_WORDS ? high | uint32_t(q[step]) : q[step], k(step), accumulate || step > 0);
  }
}
