// row_reduce.cuh: one value from all THREADS neighbouring threads that share a row, given to each of them. More than a
// warp meet in shared memory; then every thread of the block must call.
template <int THREADS, typename Combine>
__device__ __forceinline__ float row_reduce(float x,
                                            float* warps_smem,  // [warps of the block], used if THREADS > 32
                                            Combine combine) {
  constexpr int LANES = THREADS < 32 ? THREADS : 32, WARPS = THREADS / 32;
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if constexpr (WARPS > 1) {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) warps_smem[warp] = x;
    __syncthreads();  // the values of all warps of the row are there
    x = warps_smem[warp / WARPS * WARPS];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) x = combine(x, warps_smem[warp / WARPS * WARPS + i]);
  }
  return x;
}
