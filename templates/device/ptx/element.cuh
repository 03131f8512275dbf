// element.cuh: 16-bit and 32-bit storage types and their conversions. No CUDA header, so that NVRTC needs none and
// compiles fast.
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;  // as in the 64-bit Linux headers that plain nvcc includes by itself
typedef long int64_t;

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
struct Fp32 {
  float value;
};

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ float to_float(Fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float to_float(Fp32 x) { return x.value; }

template <typename Element> __device__ __forceinline__ Element from_float(float x);
template <> __device__ __forceinline__ Fp16 from_float<Fp16>(float x) {
  Fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> __device__ __forceinline__ Bf16 from_float<Bf16>(float x) {
  Bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> __device__ __forceinline__ Fp32 from_float<Fp32>(float x) { return Fp32{x}; }

// Two floats as one 32-bit register of two 16-bit elements, `low` in the lower half (the order of mma fragments).
template <typename Element> __device__ __forceinline__ uint32_t pack2(float low, float high);
template <> __device__ __forceinline__ uint32_t pack2<Fp16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <> __device__ __forceinline__ uint32_t pack2<Bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
