// block.cuh: where a thread is in its block, whose roles go by warps and warpgroups.
#include "device/ptx/shared_address.cuh"
#include "device/ptx/warp.cuh"

struct Block {
  unsigned char* smem;
  uint32_t smem_address;
  int lane, warp, warpgroup;

  explicit __device__ __forceinline__ Block(unsigned char* smem) : smem(smem) {
    smem_address = shared_address(smem);
    lane = threadIdx.x % 32;
    warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0);  // by a shuffle: uniform to the compiler
    warpgroup = warp / 4;
  }
  __device__ __forceinline__ uint32_t barrier(int first, int index) const { return smem_address + first + 8 * index; }
};
