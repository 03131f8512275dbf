// vector.cuh: WIDTH neighbouring elements moved by one load or store of 2, 4, 8 or 16 bytes. Addresses must be aligned
// to the vector's size.
#include "device/ptx/element.cuh"

template <int BYTES> struct MemoryWord;
template <> struct MemoryWord<2> {
  typedef uint16_t type;
};
template <> struct MemoryWord<4> {
  typedef uint32_t type;
};
template <> struct MemoryWord<8> {
  typedef uint2 type;
};
template <> struct MemoryWord<16> {
  typedef uint4 type;
};

template <typename Element, int WIDTH> struct alignas(sizeof(Element) * WIDTH) Vector {
  typedef typename MemoryWord<sizeof(Element) * WIDTH>::type Word;
  Element at[WIDTH];
};

// The word type is explicit: for a struct of 16-bit members the compiler would emit one load a member.
template <int WIDTH, typename Element>
__device__ __forceinline__ Vector<Element, WIDTH> load_vector(const Element* source) {
  typedef typename Vector<Element, WIDTH>::Word Word;
  Vector<Element, WIDTH> x;
  *reinterpret_cast<Word*>(&x) = *reinterpret_cast<const Word*>(source);
  return x;
}
template <typename Element, int WIDTH>
__device__ __forceinline__ void store_vector(Element* destination, const Vector<Element, WIDTH>& x) {
  typedef typename Vector<Element, WIDTH>::Word Word;
  *reinterpret_cast<Word*>(destination) = *reinterpret_cast<const Word*>(&x);
}

// The two 16-bit elements of a 32-bit register: one instruction each (a shift or a mask for bf16).
__device__ __forceinline__ void unpack2(uint32_t x, Fp16, float& low, float& high) {
  low = to_float(Fp16{uint16_t(x)});
  high = to_float(Fp16{uint16_t(x >> 16)});
}
__device__ __forceinline__ void unpack2(uint32_t x, Bf16, float& low, float& high) {
  low = __uint_as_float(x << 16);
  high = __uint_as_float(x & 0xffff0000u);
}
// y[first … first + WIDTH - 1] = x.
template <typename Element, int WIDTH, int FLOATS>
__device__ __forceinline__ void to_floats(const Vector<Element, WIDTH>& x, float (&y)[FLOATS], int first = 0) {
  if constexpr (sizeof(Element) == 2 && WIDTH >= 2) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&x);
#pragma unroll
    for (int e = 0; e < WIDTH; e += 2) unpack2(pairs[e / 2], Element{}, y[first + e], y[first + e + 1]);
  } else {
#pragma unroll
    for (int e = 0; e < WIDTH; e++) y[first + e] = to_float(x.at[e]);
  }
}

// The vector forms are written out: NVVM splits a stored uint4 of inline-asm results into four stores.
__device__ __forceinline__ void store_global(void* destination_gmem, const Vector<uint32_t, 4>& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(destination_gmem)),
               "r"(x.at[0]), "r"(x.at[1]), "r"(x.at[2]), "r"(x.at[3])
               : "memory");
}
__device__ __forceinline__ void store_global(void* destination_gmem, const Vector<uint32_t, 2>& x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(destination_gmem)), "r"(x.at[0]),
               "r"(x.at[1])
               : "memory");
}
__device__ __forceinline__ void store_global(void* destination_gmem, const Vector<uint32_t, 1>& x) {
  *reinterpret_cast<uint32_t*>(destination_gmem) = x.at[0];
}

// Rounds and stores WIDTH floats in global memory; 16-bit elements are converted in pairs.
template <int WIDTH, typename Element>
__device__ __forceinline__ void store_floats(Element* destination_gmem, const float (&x)[WIDTH]) {
  constexpr int BYTES = sizeof(Element) * WIDTH;
  if constexpr (BYTES == 2) {
    *destination_gmem = from_float<Element>(x[0]);
  } else {
    Vector<uint32_t, BYTES / 4> words;
#pragma unroll
    for (int w = 0; w < BYTES / 4; w++) {
      if constexpr (sizeof(Element) == 2) words.at[w] = pack2<Element>(x[2 * w], x[2 * w + 1]);
      else words.at[w] = __float_as_uint(x[w]);
    }
    store_global(destination_gmem, words);
  }
}
