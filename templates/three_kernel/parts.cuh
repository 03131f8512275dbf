// parts.cuh: what the three kernels of the pipeline agree on. Needs the constants of three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "device/mask.cuh"
#include "device/copy/vector.cuh"
#include "device/ptx/grid_dependency.cuh"

constexpr int DIM_TILES = HEAD_DIM / 8;          // n8 tiles of O, and 16-byte chunks per row
constexpr int DIM_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps of Q Kᵀ, the last half zero for odd DIM_TILES

template <int VALUE> struct Constant {
  static constexpr int value = VALUE;
};

using Mask = KeyMask<CAUSAL, CAUSAL_LOWER_RIGHT>;

// ZIGZAG: a kernel that reads the whole of S or P takes heads in the reverse of the order in which they were written.
// What was written last is then read while it is still in L2; in the same order a buffer a little over L2 would lose
// each line just before its turn.
__device__ __forceinline__ int values_batch_head() {
  return ZIGZAG && TILE_SOFTMAX ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
}

// DEPENDENT_LAUNCH: a kernel says when the next may begin, early or late, and waits for the kernels before it.
template <bool LATE> __device__ __forceinline__ void next_may_begin() {
  if constexpr (DEPENDENT_LAUNCH && LATE == TRIGGER_LATE) grid_dependency_launch();
}
__device__ __forceinline__ void wait_for_kernels_before() {
  if constexpr (DEPENDENT_LAUNCH) grid_dependency_wait();
}

// Keys that P V reads for queries first_row … first_row + rows - 1: all that a query of the same tile of P V sees.
// Exactly these scores are computed, and exactly these probabilities written, up to the next multiple of 8.
__device__ __forceinline__ int keys_read(int first_row, int rows, int seqlen_q, int seqlen_k) {
  if constexpr (!Mask::ROWS_DIFFER) return seqlen_k;
  const int end = (first_row + rows + PV_BLOCK_M - 1) / PV_BLOCK_M * PV_BLOCK_M;
  return max(0, Mask(seqlen_q, seqlen_k).keys_before(min(end, seqlen_q)));
}

// fp16 ends at 65504: a score past it stays finite.
template <typename S> __device__ __forceinline__ float bounded_score(float x) { return x; }
template <> __device__ __forceinline__ float bounded_score<Fp16>(float x) { return fminf(fmaxf(x, -65504.f), 65504.f); }

// Eight scores, in units of log2.
template <typename S> __device__ __forceinline__ void store_scores(S* destination_gmem, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = bounded_score<S>(x[i]);
  store_floats(destination_gmem, x);
}
template <> __device__ __forceinline__ void store_scores<Fp32>(Fp32* destination_gmem, float (&x)[8]) {
  const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
  store_floats(destination_gmem, low), store_floats(destination_gmem + 4, high);
}
