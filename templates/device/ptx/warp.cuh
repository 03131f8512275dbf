// warp.cuh: the lanes of a warp, as shuffles and votes name them.
#include "device/ptx/element.cuh"

constexpr uint32_t ALL_LANES = 0xffffffffu;
