// kept.cuh: inputs and the answer to them as evoattn's own reference gave it, kept above in words of 32 bits.
#include "export/check/device.cuh"

// The words of a buffer as its bytes.
inline Bytes bytes_of(int buffer, const unsigned* words) {
  Bytes bytes(BUFFER_BYTES[buffer]);
  std::memcpy(bytes.data(), words, bytes.size());
  return bytes;
}

inline float float_from_e4m3(unsigned char x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 127) == 127) return NAN;
  return std::ldexp(float(exponent ? 8 + mantissa : mantissa), exponent ? exponent - 10 : -9) * (x & 128 ? -1 : 1);
}

inline double element(const Bytes& bytes, Dtype dtype, size_t i) {
  switch (dtype) {
    case Dtype::fp32:
      return load_as<Dtype::fp32>(bytes, i);
    case Dtype::fp16:
      return load_as<Dtype::fp16>(bytes, i);
    case Dtype::bf16:
      return load_as<Dtype::bf16>(bytes, i);
    case Dtype::e4m3:
      return float_from_e4m3(bytes[i]);
    case Dtype::e5m2:
      return float_from_half((unsigned short)(bytes[i] << 8));
    case Dtype::int8:
      return (signed char)bytes[i];
  }
  return NAN;
}

// Is one output right? Its exact elements are floats, in the order in which they lie in memory. Of logarithms those
// that are -inf must be, and no other.
inline bool judge(const char* when, const Device& device, int answer) {
  const Bytes out = device.read(ANSWER_BUFFERS[answer], 0, BUFFER_BYTES[ANSWER_BUFFERS[answer]]);
  const size_t elements = ANSWER_ELEMENTS[answer];
  size_t wrong = 0;
  double largest = 0, squares = 0;
  for (size_t i = 0; i < elements; i++) {
    const double x = element(out, ANSWER_DTYPES[answer], i), exact = float_of(ANSWER_WORDS[answer][i]);
    if (std::isnan(x) || (LOGARITHMS[answer] && (std::isinf(x) || std::isinf(exact)))) {
      wrong += x != exact;
      continue;
    }
    const double difference = std::fabs(x - exact);
    largest = std::max(largest, difference), squares += difference * difference;
  }
  const double rms = std::sqrt(squares / double(elements));
  const bool right = wrong == 0 && largest <= ALLOWED_LARGEST[answer] && rms <= ALLOWED_RMS[answer];
  std::printf(
      "%s %-14s %-4s max error %.3e (allowed %.3e), rms error %.3e (allowed %.3e), "
      "%zu of %zu NaN, never written or wrongly infinite\n",
      right ? "ok  " : "FAIL", when, ANSWER_NAMES[answer], largest, ALLOWED_LARGEST[answer], rms, ALLOWED_RMS[answer],
      wrong, elements);
  return right;
}

struct Proof {
  Inputs inputs;

  Proof() {
    for (int i = 0; i < KEPT_INPUTS; i++)
      inputs.push_back({INPUT_BUFFERS[i], bytes_of(INPUT_BUFFERS[i], INPUT_WORDS[i])});
  }
  bool right(const char* when, const Device& device) const {
    EVOATTN_CUDA(cudaDeviceSynchronize());
    bool right = device.guards_intact();
    for (int answer = 0; answer < ANSWERS; answer++) right = judge(when, device, answer) && right;
    return right;
  }
};
