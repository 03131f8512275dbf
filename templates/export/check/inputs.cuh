// inputs.cuh: random tensors, and elements of the problem's DTYPE.
#include "export/check/elements.cuh"

inline float load(const Bytes& tensor, size_t i) { return load_as<DTYPE>(tensor, i); }
inline void store(Bytes& tensor, size_t i, float x) {
  if constexpr (DTYPE == Dtype::fp32) {
    std::memcpy(&tensor[4 * i], &x, 4);
    return;
  }
  unsigned short h = DTYPE == Dtype::fp16 ? half_from_float(x) : bfloat_from_float(x);
  std::memcpy(&tensor[2 * i], &h, 2);
}
inline float rounded(float x) {  // to DTYPE and back
  if constexpr (DTYPE == Dtype::fp32) return x;
  return DTYPE == Dtype::fp16 ? float_from_half(half_from_float(x)) : float_of(unsigned(bfloat_from_float(x)) << 16);
}
inline size_t offset(const long (&strides)[3], long b, long h, long s) {
  return size_t(b * strides[0] + h * strides[1] + s * strides[2]);
}

inline unsigned long long next_random(unsigned long long& state) {  // splitmix64
  unsigned long long z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
// Elements that are the sum of four uniform 16-bit numbers, scaled to variance 1: close to normal, and cheap.
inline Bytes random_tensor(size_t elements, unsigned long long seed) {
  Bytes tensor(elements * ELEMENT_BYTES);
  for (size_t i = 0; i < elements; i++) {
    unsigned long long r = next_random(seed);
    float sum = float(r & 0xffff) + float(r >> 16 & 0xffff) + float(r >> 32 & 0xffff) + float(r >> 48);
    store(tensor, i, (sum - 131070.0f) / 37836.9f);  // 65535 * sqrt(4 / 12)
  }
  return tensor;
}
