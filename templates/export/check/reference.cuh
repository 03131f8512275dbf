// reference.cuh: rows of O in double, and the same formula in DTYPE, from which the allowed error follows.
#include "export/check/terms.cuh"

constexpr double CPU_BUDGET = 4294967296.0;  // multiply-adds of the reference: 2^32, a few seconds on one core

struct Allowed {
  double largest, rms;
};
struct Row {  // of O
  long b, h, s;
  std::vector<double> exact;  // [VALUE_DIM]
  double lse;                 // logarithm of the sum of exponentials
};

// The rows to check: all of them, or first, last and one at random in each of equal strata of every head of every
// sequence, as CPU_BUDGET allows.
inline std::vector<Row> choose_rows() {
  unsigned long long state = 4;
  std::vector<Row> rows;
  for (long b = 0; b < BATCH; b++) {
    const long count = QUERIES[b];
    const double cost = 2.0 * double(std::max(1L, KEYS[b])) * double(HEAD_DIM + VALUE_DIM);  // exact, and in DTYPE
    const long strata = std::max(1L, std::min(count, long(CPU_BUDGET / cost / double(BATCH * HEADS))));
    for (long h = 0; h < (count ? HEADS : 0); h++) {
      long last = -1;
      for (long i = 0; i < strata; i++) {
        const long begin = count * i / strata, end = count * (i + 1) / strata;
        const long s = i == 0            ? 0
                       : i == strata - 1 ? count - 1
                                         : begin + long(next_random(state) % (unsigned long long)(end - begin));
        rows.push_back({b, h, last = s, {}, -INFINITY});
      }
      if (last != count - 1) rows.push_back({b, h, count - 1, {}, -INFINITY});
    }
  }
  return rows;
}

// nvcc builds host code without optimization unless told, and the reference is all in these three loops.
#if defined(__GNUC__) && !defined(__clang__)
#define EVOATTN_FAST __attribute__((optimize("O3")))
#else
#define EVOATTN_FAST
#endif

// scores[j] = sum_d query[d] * keys_t[d][j] for j < keys, accumulated in T.
template <typename T>
EVOATTN_FAST void products(std::vector<T>& scores, const std::vector<T>& query, const std::vector<float>& keys_t,
                           long keys) {
  std::fill(scores.begin(), scores.end(), T(0));
  T* s = scores.data();
  for (long d = 0; d < HEAD_DIM; d++) {
    const float* key = &keys_t[size_t(d) * SEQLEN_K];
    const T q = query[d];
    for (long j = 0; j < keys; j++) s[j] += q * T(key[j]);
  }
}
// out[d] = sum_j weights[j] * values[j][d] for j < keys, accumulated in T.
template <typename T>
EVOATTN_FAST void weighted_sum(std::vector<T>& out, const std::vector<T>& weights, const std::vector<float>& values,
                               long keys) {
  std::fill(out.begin(), out.end(), T(0));
  T* o = out.data();
  for (long j = 0; j < keys; j++) {
    const float* value = &values[size_t(j) * VALUE_DIM];
    const T w = weights[j];
    for (long d = 0; d < VALUE_DIM; d++) o[d] += w * T(value[d]);
  }
}
// scores -> exp(score - max) / sum over the first `keys` and `sink`; the others are left alone. Returns max + log(sum);
// where all are -inf, zeros and -inf.
template <typename T> EVOATTN_FAST T softmax(std::vector<T>& scores, long keys, T sink) {
  T most = std::max(sink, *std::max_element(scores.begin(), scores.begin() + keys)), *s = scores.data();
  if (most == T(-INFINITY)) {
    std::fill(scores.begin(), scores.begin() + keys, T(0));
    return most;
  }
  T sum = std::exp(sink - most);
  for (long j = 0; j < keys; j++) sum += s[j] = std::exp(s[j] - most);
  for (long j = 0; j < keys; j++) s[j] /= sum;
  return most + std::log(sum);
}

// Fills `exact` of every row. flash-attention's rule (its tests/test_flash_attn.py):
// max|out - exact| <= 2 max|low - exact| + 2 max|(exact + 0.3 - 0.3) - exact|; the root-mean-square error likewise.
// Where `low` is nearly exact, a unit in the last place of the largest output is allowed in any case, and for fp32 1e-5
// of it (evoattn/correctness/reference.py).
inline Allowed reference(std::vector<Row>& rows, const Bytes& q, const Bytes& k, const Bytes& v, const Terms& terms,
                         const Sequences& sequences) {
  std::vector<float> keys_t(size_t(SEQLEN_K) * HEAD_DIM), values(size_t(SEQLEN_K) * VALUE_DIM), low_query(HEAD_DIM),
      low_scores(SEQLEN_K), low(VALUE_DIM);
  std::vector<double> query(HEAD_DIM), scores(SEQLEN_K);
  double low_most = 0, nudged_most = 0, low_squares = 0, rounding_squares = 0, most = 0, squares = 0;
  long loaded_batch = -1, loaded_head = -1;
  for (Row& row : rows) {
    row.exact.assign(VALUE_DIM, 0.0);
    const long kv_head = row.h / (HEADS / KV_HEADS), keys = keys_up_to(row.b, row.s);
    const double sink = sink_of(terms, row.h);
    row.lse = sink;
    if (keys <= 0) continue;  // sees no key: O = 0
    if (row.b != loaded_batch || kv_head != loaded_head) {
      for (long j = 0; j < KEYS[row.b]; j++) {
        const Place at = sequences.key(row.b, j);
        const size_t key = offset(K_STRIDES, at.batch, kv_head, at.row);
        const size_t value = offset(V_STRIDES, at.batch, kv_head, at.row);
        for (long d = 0; d < HEAD_DIM; d++) keys_t[size_t(d) * SEQLEN_K + j] = load(k, key + d);
        for (long d = 0; d < VALUE_DIM; d++) values[size_t(j) * VALUE_DIM + d] = load(SHARED_KV ? k : v, value + d);
      }
      loaded_batch = row.b, loaded_head = kv_head;
    }
    const Place at = sequences.query(row.b, row.s);
    for (long d = 0; d < HEAD_DIM; d++) {
      float x = load(q, offset(Q_STRIDES, at.batch, row.h, at.row) + d);
      query[d] = x * SCALE, low_query[d] = rounded(x * float(SCALE));
    }
    products(scores, query, keys_t, keys);
    apply(scores, terms, row.b, row.h, row.s, keys);
    row.lse = softmax(scores, keys, sink);
    weighted_sum(row.exact, scores, values, keys);
    products(low_scores, low_query, keys_t, keys);
    for (long j = 0; j < keys; j++) low_scores[j] = rounded(low_scores[j]);
    apply(low_scores, terms, row.b, row.h, row.s, keys);
    softmax(low_scores, keys, float(sink));
    for (long j = 0; j < keys; j++) low_scores[j] = rounded(low_scores[j]);
    weighted_sum(low, low_scores, values, keys);
    for (long d = 0; d < VALUE_DIM; d++) {
      double exact = row.exact[d], low_error = double(rounded(low[d])) - exact;
      float nearest = rounded(float(exact)), nudged = rounded(rounded(nearest + 0.3f) - 0.3f);
      low_most = std::max(low_most, std::fabs(low_error)),
      nudged_most = std::max(nudged_most, std::fabs(double(nudged) - nearest));
      low_squares += low_error * low_error, rounding_squares += (nearest - exact) * (nearest - exact);
      most = std::max(most, std::fabs(exact)), squares += exact * exact;
    }
  }
  const double n = double(rows.size()) * VALUE_DIM, floor = DTYPE == Dtype::fp32   ? 1e-5
                                                            : DTYPE == Dtype::bf16 ? 0x1p-7
                                                                                   : 0x1p-10;
  const double rms_floor = DTYPE == Dtype::fp32 ? floor : floor / 2;
  return {std::max(2 * low_most + 2 * nudged_most, floor * most),
          std::max(2 * std::sqrt(low_squares / n) + 2 * std::sqrt(rounding_squares / n),
                   rms_floor * std::sqrt(squares / n))};
}
