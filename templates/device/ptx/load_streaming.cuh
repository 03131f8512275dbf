// load_streaming.cuh: reads past L1, which would keep what no other thread wants. Not `valid`: reads nothing, zeros.
#include "device/ptx/element.cuh"

template <int BYTES>
__device__ __forceinline__ void load_streaming(uint32_t (&x)[BYTES / 4], const void* source_gmem, bool valid);
template <> __device__ __forceinline__ void load_streaming<16>(uint32_t (&x)[4], const void* source_gmem, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "l"(source_gmem), "r"(int(valid)));
}
template <> __device__ __forceinline__ void load_streaming<8>(uint32_t (&x)[2], const void* source_gmem, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n}"
      : "=&r"(x[0]), "=&r"(x[1])
      : "l"(source_gmem), "r"(int(valid)));
}
template <> __device__ __forceinline__ void load_streaming<4>(uint32_t (&x)[1], const void* source_gmem, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.L1::no_allocate.b32 %0, [%1];\n}"
      : "=&r"(x[0])
      : "l"(source_gmem), "r"(int(valid)));
}
