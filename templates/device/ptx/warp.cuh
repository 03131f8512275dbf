// warp.cuh: the lanes of a warp, as shuffles and votes name them.
#include "device/ptx/element.cuh"

constexpr uint32_t ALL_LANES = 0xffffffffu;

// The greatest x of all lanes.
__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
  uint32_t y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
