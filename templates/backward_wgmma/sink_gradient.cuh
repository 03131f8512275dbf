// sink_gradient.cuh: the gradient of a head's sink: -Σ P · delta over its queries, P being the sink's share of a row.
// One block adds them up, in the same order in every run. Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"

struct SinkSums {
  const float *log_sums_gmem, *deltas_gmem;  // [batch, heads, rows]: of each query; of one that is none +inf and 0
  const Element* sinks_gmem;                 // [heads]
  int heads, batches, rows;

  // By all ROW_THREADS of a block.
  __device__ __forceinline__ void write(float* dsinks_gmem, int head) const {
    constexpr float LOG2_E = 1.44269504088896340736f;
    __shared__ float of_warps[ROW_THREADS / 32];
    const float sink = to_float(sinks_gmem[head]) * LOG2_E;
    float sum = 0.f;
    for (int b = 0; b < batches; ++b) {
      const int64_t first = (int64_t(b) * heads + head) * rows;
      for (int i = threadIdx.x; i < rows; i += ROW_THREADS)
        sum = fmaf(exp2_approx(sink - log_sums_gmem[first + i]), deltas_gmem[first + i], sum);
    }
#pragma unroll
    for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, away);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();  // every warp's sum is there
    if (threadIdx.x == 0) {
      sum = 0.f;
#pragma unroll
      for (int i = 0; i < ROW_THREADS / 32; ++i) sum += of_warps[i];
      dsinks_gmem[head] = -sum;
    }
    __syncthreads();  // it has been read
  }
};
