// elements.cuh: tensors on the CPU, of 16-bit or 32-bit elements (IEEE 754, round to nearest even).
using Bytes = std::vector<unsigned char>;
using Inputs = std::vector<std::pair<int, Bytes>>;  // by their buffers

inline unsigned bits_of(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline unsigned short half_from_float(float x) {
  unsigned u = bits_of(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // rounds to 65536 or more: infinity
  if (magnitude < 0x38800000u)                                            // below 2^-14: a multiple of 2^-24
    return (unsigned short)(sign | (unsigned)std::lrintf(float_of(magnitude) * 16777216.0f));
  return (unsigned short)(sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13);
}
inline float float_from_half(unsigned short h) {
  unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return float_of(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}
inline unsigned short bfloat_from_float(float x) {
  unsigned u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return (unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
template <Dtype TYPE> float load_as(const Bytes& tensor, size_t i) {
  if constexpr (TYPE == Dtype::fp32) {
    float x;
    std::memcpy(&x, &tensor[4 * i], 4);
    return x;
  }
  unsigned short h;
  std::memcpy(&h, &tensor[2 * i], 2);
  return TYPE == Dtype::fp16 ? float_from_half(h) : float_of(unsigned(h) << 16);
}
