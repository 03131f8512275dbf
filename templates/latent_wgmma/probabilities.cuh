// probabilities.cuh: P of a tile of keys, in registers or shared memory, and its product with columns of V. Needs the
// constants of latent_wgmma.cu.j2.
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/softmax/wgmma_softmax.cuh"

// Columns of V from `v_descriptor` on times P: O += P V.
template <class Rows>
__device__ __forceinline__ void multiply_pv(float (&o)[HALF / 2], const Rows& p, uint64_t v_descriptor) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < KEY_STEPS; ++step) {
#pragma unroll
    for (int part = 0; part < HALF / PV_COLUMNS; ++part) {
      auto& columns = reinterpret_cast<float(&)[PV_COLUMNS / 2]>(o[part * (PV_COLUMNS / 2)]);
      const uint64_t v_step =
          v_descriptor + descriptor_step(step * 16 * 128 + part * (PV_COLUMNS / 64) * BLOCK_N * 128);
      if constexpr (Rows::IN_REGISTERS) wgmma_pv(columns, p.frag[step], v_step, true);
      else wgmma_pv_shared(columns, p.tile[step], v_step, true);
    }
  }
  wgmma_commit();
}
struct RegisterP {
  static constexpr bool IN_REGISTERS = true;
  uint32_t frag[KEY_STEPS][4];
  // The warp's rows to tile `at` in shared memory.
  __device__ __forceinline__ void store(int at, uint32_t p_smem, int warp, int lane) const {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < KEY_STEPS; ++i) {
      const int step = at * KEY_STEPS + i, column = (step % 4 * 2 + lane / 16) ^ (row % 8);
      stmatrix_x4(p_smem + step / 4 * 64 * 128 + row * 128 + column * 16, frag[i][0], frag[i][1], frag[i][2],
                  frag[i][3]);
    }
  }
  __device__ __forceinline__ void load(int at, uint32_t p_smem, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < KEY_STEPS; ++i)
      RowOperand<BLOCK_N, false>::fragment(frag[i], at * KEY_STEPS + i, p_smem, warp, lane);
  }
};
struct SharedP {
  static constexpr bool IN_REGISTERS = false;
  RowOperand<BLOCK_N, false> tile;
  __device__ __forceinline__ void load(int at, uint32_t p_smem, int warp, int lane) { tile.load(p_smem, warp, lane); }
};
// Of a warpgroup without scores.
template <bool> struct OtherPOf {
  using type = SharedP;
};
template <> struct OtherPOf<true> {
  using type = RegisterP;
};
using OtherP = OtherPOf<SCORES_ALONE>::type;
