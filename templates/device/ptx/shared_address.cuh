// shared_address.cuh: the 32-bit address in shared memory that PTX instructions take.
#include "device/ptx/element.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}
