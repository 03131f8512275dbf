// terms.cuh: what a problem does to scores between the product and the softmax, and the inputs that it takes.
#include "export/check/sequences.cuh"

inline size_t bytes_of(int buffer) { return buffer < 0 ? 0 : BUFFER_BYTES[buffer]; }

struct Terms {
  Bytes sinks;   // [HEADS]
  Bytes slopes;  // [HEADS], float
  Bytes bias;    // at BIAS_STRIDES
};

// Normal sinks and biases, and the slopes of the ALiBi paper.
inline Terms random_terms() {
  Terms terms;
  terms.sinks = random_tensor(bytes_of(SINKS) / ELEMENT_BYTES, 5);
  terms.bias = random_tensor(bytes_of(BIAS) / ELEMENT_BYTES, 6);
  terms.slopes.resize(bytes_of(SLOPES));
  for (long h = 0; h < (SLOPES < 0 ? 0 : HEADS); h++) {
    const float slope = float(std::exp2(-8.0 * double(h + 1) / HEADS));
    std::memcpy(&terms.slopes[4 * h], &slope, 4);
  }
  return terms;
}

// One more score of a row, without a value; -inf for none.
inline double sink_of(const Terms& terms, long head) {
  if constexpr (SINKS >= 0) return load(terms.sinks, head);
  return -INFINITY;
}

inline double with_rounding(double x) { return x; }
inline float with_rounding(float x) { return rounded(x); }

// What becomes of the first `keys` scores of query `s` of head `h`: -inf where a window hides.
template <typename T> void apply(std::vector<T>& scores, const Terms& terms, long b, long h, long s, long keys) {
  const long here = s + diagonal(b);
  float slope = 0;
  if constexpr (SLOPES >= 0) std::memcpy(&slope, &terms.slopes[4 * h], 4);
  for (long j = 0; j < keys; j++) {
    T score = scores[j];
    if constexpr (SOFTCAP > 0) score = with_rounding(T(SOFTCAP) * std::tanh(score / T(SOFTCAP)));
    if constexpr (SLOPES >= 0) score -= T(slope) * T(std::labs(j - here));
    if constexpr (BIAS >= 0) score += T(load(terms.bias, offset(BIAS_STRIDES, b, h, s) + j));
    if (WINDOW && (j < here - PAST || j > here + AHEAD)) score = T(-INFINITY);
    scores[j] = score;
  }
}

// First Q, K and V.
inline Inputs make_inputs(const Terms& terms, const Sequences& sequences) {
  auto random = [](int i) { return random_tensor(BUFFER_BYTES[i] / ELEMENT_BYTES, i + 1); };
  Inputs inputs{{Q, random(Q)}, {K, with_keys_in_use(random(K), K_STRIDES, HEAD_DIM, sequences)}};
  inputs.push_back({V, SHARED_KV ? Bytes() : with_keys_in_use(random(V), V_STRIDES, VALUE_DIM, sequences)});
  for (const auto& term : {std::pair(SINKS, terms.sinks), std::pair(SLOPES, terms.slopes), std::pair(BIAS, terms.bias),
                           std::pair(SEQUSED, bytes_of(sequences.used)), std::pair(TABLE, bytes_of(sequences.table)),
                           std::pair(CU_SEQLENS_Q, bytes_of(sequences.query_starts)),
                           std::pair(CU_SEQLENS_K, bytes_of(sequences.key_starts))})
    if (term.first >= 0) inputs.push_back(term);
  return inputs;
}
