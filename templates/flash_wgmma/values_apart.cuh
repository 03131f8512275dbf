// values_apart.cuh: O += P V of some steps of 16 keys by the mma of a single warp, whose sums have the bits of wgmma's
// and come in the same order: the rare way where a row of one warp is raised between two tiles that are multiplied as
// one. Those P are 0 then, and wgmma adds nothing more.
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/tma.cuh"

template <class Operands, int BLOCK_N, int FIRST_STEP, int STEPS, int FLOATS>
__device__ __forceinline__ void values_apart(float (&o)[FLOATS], uint32_t (&p)[STEPS][4],
                                             uint32_t v_smem,  // a tile of BLOCK_N rows
                                             int lane) {
  float(&quads)[FLOATS / 4][4] = reinterpret_cast<float(&)[FLOATS / 4][4]>(o);  // accumulators of an mma
#pragma unroll
  for (int step = FIRST_STEP; step < STEPS; ++step) {
    const uint32_t row_smem = v_smem + (step * 16 + lane % 16) * 128;
#pragma unroll
    for (int tile = 0; tile < FLOATS / 4; tile += 2) {  // 8 columns each
      uint32_t v[4];  // keys 0..7 and 8..15 of 8 columns, then of the next, which read zero where there are none
      ldmatrix_x4_trans(v, row_smem + tile / 8 * BLOCK_N * 128 + ((tile % 8 + lane / 16) ^ lane % 8) * 16);
      Operands::mma(quads[tile], p[step], v[0], v[1]);
      if (tile + 1 < FLOATS / 4) Operands::mma(quads[tile + 1], p[step], v[2], v[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 3 - Operands::ROWS_OF_LANE) p[step][i] = 0;
  }
  fence_proxy_async();  // before the copies that overwrite this V
  __syncwarp();         // all lanes have read it when one says for the warp that it is free
}
