// inputs.cuh: random tensors.
#include "export/check/elements.cuh"

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
