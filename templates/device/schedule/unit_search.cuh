// unit_search.cuh: work of items one behind the other, each of which counts some units.
#include "device/ptx/warp.cuh"

// By a whole warp: the item of `count` that has unit `unit` of all. The first begins at unit `begin`, which becomes the
// first unit of the item found. `units_of(i)` is what item i counts.
template <class Units>
__device__ __forceinline__ int item_of_unit(int unit, int count, int lane, int& begin, Units units_of) {
  for (int first = 0;; first += 32) {
    const int own = first + lane < count ? units_of(first + lane) : 0;
    int behind = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(ALL_LANES, behind, step);
      if (lane >= step) behind += before;
    }
    const uint32_t later = __ballot_sync(ALL_LANES, begin + behind > unit);
    const int last = min(31, 32 - __popc(later));  // the first of them: later items end later
    const int before_it = __shfl_sync(ALL_LANES, behind - (later ? own : 0), last);
    begin += before_it;
    if (later) return first + last;
  }
}
