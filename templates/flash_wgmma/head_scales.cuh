// head_scales.cuh: where the scales of heads, or of blocks of their rows, lie in global memory.
#include "device/ptx/load_constant.cuh"

// By which the numbers of 8 bits of a head of a sequence are multiplied; BY_BLOCK those of a block of rows.
struct HeadScales {
  const float* scales;
  int64_t batch_stride, head_stride, block_stride;
  __device__ __forceinline__ float of(int batch, int head) const {
    return __ldg(scales + batch * batch_stride + head * head_stride);
  }
  // BY_BLOCK: where a head's begin, and one of them. There are fewer than 2^31.
  __device__ __forceinline__ int of_head(int batch, int head) const {
    return batch * int(batch_stride) + head * int(head_stride);
  }
  __device__ __forceinline__ float of_block(int first, int block) const {
    return load_constant(scales + (first + block * int(block_stride)));
  }
};
