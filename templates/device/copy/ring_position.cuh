// ring_position.cuh: a place in a ring of STAGES buffers, each with a barrier for "full" and one for "empty". Consumers
// wait for `parity` of the full barrier, the producer for the other parity of the empty one, which the first time round
// is there at once.
#include "device/ptx/element.cuh"

template <int STAGES> struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
