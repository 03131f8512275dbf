// scores_again.cuh: S = Q Kᵀ once more, by the mma of a single warp: the rare way back when one warp of a warpgroup has
// lost its scores. wgmma would need all four warps; the fragments of S are the same.
#include "device/ptx/element.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"

template <class Operands, int BLOCK_N, class Rows>
__device__ __forceinline__ void scores_again(float (&s)[BLOCK_N / 2],  // of the warp's 16 rows
                                             const Rows& q, uint32_t q_smem,
                                             uint32_t k_smem,  // tiles of 64 rows and of BLOCK_N rows
                                             int warp, int lane) {
  float(&quads)[BLOCK_N / 8][4] = reinterpret_cast<float(&)[BLOCK_N / 8][4]>(s);  // accumulators of an mma
  const uint32_t row_smem = k_smem + (lane / 16 * 8 + lane % 8) * 128;            // of the first 16 keys
  const uint32_t swizzle = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = 0.f;
#pragma unroll
  for (int step = 0; step < TensorTile<Operands::ROW_COLUMNS>::DIM_STEPS; ++step) {
    uint32_t a[4];
    q.fragment(a, step, q_smem, warp, lane);
#pragma unroll
    for (int key = 0; key < BLOCK_N; key += 16) {
      uint32_t k[4];  // keys 0..7: both halves of a step's 32 bytes; keys 8..15: the same
      ldmatrix_x4(k, row_smem + (step / 4 * BLOCK_N + key) * 128 + (swizzle ^ step % 4 * 32));
      Operands::mma(quads[key / 8], a, k[0], k[1]);
      Operands::mma(quads[key / 8 + 1], a, k[2], k[3]);
    }
  }
  fence_proxy_async();  // before the copies that overwrite this K, and this Q
  __syncwarp();         // all lanes have read the warp's rows of Q, which its rows of O may overwrite
}
