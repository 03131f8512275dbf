  // sink_gradient.cuh, a part of the kernel's body: blocks behind those of tiles add up the gradient of a head's sink,
  // in the same order in every run.
  if constexpr (SINK_GRADIENT) {
    constexpr int SINK_THREADS = DQ_ADDED ? ROW_THREADS : 32 * PASS_WARPS;
    const bool by_heads = !DQ_ADDED && HEADS_FASTEST;
    const int sink_head = by_heads ? blockIdx.x : blockIdx.y, of_batch = by_heads ? blockIdx.y : blockIdx.z;
    if ((by_heads ? blockIdx.z + 1 == gridDim.z : blockIdx.x + 1 == gridDim.x)) {
      if (of_batch > 0) return;
      __shared__ float warp_sums[SINK_THREADS / 32];
      float sum = 0.f;
      for (int b = 0; b < int(by_heads ? gridDim.y : gridDim.z); ++b) {
        const float* tiles_gmem = sink_sums + tile_number(b, heads, sink_head, query_tiles, 0);
        for (int i = threadIdx.x; i < query_tiles; i += SINK_THREADS) sum += tiles_gmem[i];
      }
#pragma unroll
      for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, away);
      if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
      __syncthreads();  // every warp's sum is there
      if (threadIdx.x == 0) {
        sum = 0.f;
        for (int i = 0; i < SINK_THREADS / 32; ++i) sum += warp_sums[i];
        dsinks_gmem[sink_head] = -sum;
      }
      return;
    }
  }
