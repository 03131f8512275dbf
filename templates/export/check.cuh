// check.cuh: checks the kernel above against a CPU reference and times it. The constants and launches above it
// are generated.
using Bytes = std::vector<unsigned char>;
struct Shape {
  long batch, heads, seqlen;
};  // of one tensor [batch, heads, seqlen, HEAD_DIM]
struct Error {
  double largest, rms;
};
struct Allowed {
  double largest, rms;
};

constexpr size_t GUARD_BYTES = 4096;  // on either side of every buffer on the device
constexpr int GUARD_VALUE = 0x5A;
constexpr double CPU_BUDGET = 4294967296.0;  // multiply-adds of the reference: 2^32, a few seconds on one core
constexpr int SAMPLES = 51, MAX_CALLS = 200;
constexpr float REPLAY_US = 1000;  // work in one replayed graph

#define EVOATTN_CUDA(call) ::evoattn_check::require((call), #call, __LINE__)
inline void require(cudaError_t status, const char* call, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s (%s)\n", line, call, cudaGetErrorString(status), cudaGetErrorName(status));
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion)
    std::fprintf(stderr, "This file was built for another architecture: build it with the -arch of this device.\n");
  std::exit(1);
}

// ---- 16-bit and 32-bit elements on the CPU (IEEE 754, round to nearest even) ----
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
inline float load(const Bytes& tensor, size_t i) {
  if constexpr (DTYPE == Dtype::fp32) {
    float x;
    std::memcpy(&x, &tensor[4 * i], 4);
    return x;
  }
  unsigned short h;
  std::memcpy(&h, &tensor[2 * i], 2);
  return DTYPE == Dtype::fp16 ? float_from_half(h) : float_of(unsigned(h) << 16);
}
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

// ---- inputs: the sum of four uniform 16-bit numbers, scaled to variance 1 (close to normal, and cheap) ----
inline unsigned long long next_random(unsigned long long& state) {  // splitmix64
  unsigned long long z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
inline Bytes random_tensor(size_t elements, unsigned long long seed) {
  Bytes tensor(elements * ELEMENT_BYTES);
  for (size_t i = 0; i < elements; i++) {
    unsigned long long r = next_random(seed);
    float sum = float(r & 0xffff) + float(r >> 16 & 0xffff) + float(r >> 32 & 0xffff) + float(r >> 48);
    store(tensor, i, (sum - 131070.0f) / 37836.9f);  // 65535 * sqrt(4 / 12)
  }
  return tensor;
}

// ---- the reference: rows of O in double, and the same formula in DTYPE, from which the allowed error follows ----
struct Row {
  long b, h, s;
  std::vector<double> exact;
  double lse;
};  // exact[HEAD_DIM]; lse: logarithm of the sum of exponentials

// The rows to check: all of them, or first, last and one at random in each of equal strata of every head, as CPU_BUDGET
// allows.
inline std::vector<Row> choose_rows() {
  double affordable = CPU_BUDGET / (4.0 * double(SEQLEN_K) * HEAD_DIM) / double(BATCH * HEADS);
  long strata = std::max(1L, std::min(SEQLEN_Q, long(affordable)));
  unsigned long long state = 4;
  std::vector<Row> rows;
  for (long b = 0; b < BATCH; b++)
    for (long h = 0; h < HEADS; h++) {
      long last = -1;
      for (long i = 0; i < strata; i++) {
        long begin = SEQLEN_Q * i / strata, end = SEQLEN_Q * (i + 1) / strata;
        long s = i == 0            ? 0
                 : i == strata - 1 ? SEQLEN_Q - 1
                                   : begin + long(next_random(state) % (unsigned long long)(end - begin));
        rows.push_back({b, h, last = s, {}, -INFINITY});
      }
      if (last != SEQLEN_Q - 1) rows.push_back({b, h, SEQLEN_Q - 1, {}, -INFINITY});
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
    const float* value = &values[size_t(j) * HEAD_DIM];
    const T w = weights[j];
    for (long d = 0; d < HEAD_DIM; d++) o[d] += w * T(value[d]);
  }
}
// scores -> exp(score - max) / sum over the first `keys`; the others are left alone. Returns max + log(sum).
template <typename T> EVOATTN_FAST T softmax(std::vector<T>& scores, long keys) {
  T most = *std::max_element(scores.begin(), scores.begin() + keys), sum = 0, *s = scores.data();
  for (long j = 0; j < keys; j++) sum += s[j] = std::exp(s[j] - most);
  for (long j = 0; j < keys; j++) s[j] /= sum;
  return most + std::log(sum);
}

// Fills `exact` of every row. flash-attention's rule (its tests/test_flash_attn.py):
// max|out - exact| <= 2 max|low - exact| + 2 max|(exact + 0.3 - 0.3) - exact|; the root-mean-square error likewise.
// For fp32, where `low` is nearly exact, 1e-5 of the largest output is allowed in any case.
inline Allowed reference(std::vector<Row>& rows, const Bytes& q, const Bytes& k, const Bytes& v) {
  const double scale = 1.0 / std::sqrt(double(HEAD_DIM));
  std::vector<float> keys_t(size_t(SEQLEN_K) * HEAD_DIM), values(keys_t.size()), low_query(HEAD_DIM),
      low_scores(SEQLEN_K), low(HEAD_DIM);
  std::vector<double> query(HEAD_DIM), scores(SEQLEN_K);
  double low_most = 0, nudged_most = 0, low_squares = 0, rounding_squares = 0, most = 0, squares = 0;
  long loaded_batch = -1, loaded_head = -1;
  for (Row& row : rows) {
    row.exact.assign(HEAD_DIM, 0.0);
    long kv_head = row.h / (HEADS / KV_HEADS), keys = CAUSAL ? std::min(SEQLEN_K, row.s + CAUSAL_OFFSET + 1) : SEQLEN_K;
    if (keys <= 0) continue;  // sees no key: O = 0
    if (row.b != loaded_batch || kv_head != loaded_head) {
      for (long j = 0; j < SEQLEN_K; j++)
        for (long d = 0; d < HEAD_DIM; d++) {
          keys_t[size_t(d) * SEQLEN_K + j] = load(k, offset(K_STRIDES, row.b, kv_head, j) + d);
          values[size_t(j) * HEAD_DIM + d] = load(v, offset(V_STRIDES, row.b, kv_head, j) + d);
        }
      loaded_batch = row.b, loaded_head = kv_head;
    }
    for (long d = 0; d < HEAD_DIM; d++) {
      float x = load(q, offset(Q_STRIDES, row.b, row.h, row.s) + d);
      query[d] = x * scale, low_query[d] = rounded(x * float(scale));
    }
    products(scores, query, keys_t, keys);
    row.lse = softmax(scores, keys);
    weighted_sum(row.exact, scores, values, keys);
    products(low_scores, low_query, keys_t, keys);
    for (long j = 0; j < keys; j++) low_scores[j] = rounded(low_scores[j]);
    softmax(low_scores, keys);
    for (long j = 0; j < keys; j++) low_scores[j] = rounded(low_scores[j]);
    weighted_sum(low, low_scores, values, keys);
    for (long d = 0; d < HEAD_DIM; d++) {
      double exact = row.exact[d], low_error = double(rounded(low[d])) - exact;
      float nearest = rounded(float(exact)), nudged = rounded(rounded(nearest + 0.3f) - 0.3f);
      low_most = std::max(low_most, std::fabs(low_error)),
      nudged_most = std::max(nudged_most, std::fabs(double(nudged) - nearest));
      low_squares += low_error * low_error, rounding_squares += (nearest - exact) * (nearest - exact);
      most = std::max(most, std::fabs(exact)), squares += exact * exact;
    }
  }
  const double n = double(rows.size()) * HEAD_DIM, floor = DTYPE == Dtype::fp32 ? 1e-5 : 0.0;
  return {
      std::max(2 * low_most + 2 * nudged_most, floor * most),
      std::max(2 * std::sqrt(low_squares / n) + 2 * std::sqrt(rounding_squares / n), floor * std::sqrt(squares / n))};
}

// ---- the device ----
struct Device {  // every buffer lies between two guard bands
  unsigned char* whole[BUFFERS];
  void* buffer[BUFFERS];

  Device() {
    for (int i = 0; i < BUFFERS; i++) {
      EVOATTN_CUDA(cudaMalloc((void**)&whole[i], BUFFER_BYTES[i] + 2 * GUARD_BYTES));
      EVOATTN_CUDA(cudaMemset(whole[i], GUARD_VALUE, BUFFER_BYTES[i] + 2 * GUARD_BYTES));
      buffer[i] = whole[i] + GUARD_BYTES;
      EVOATTN_CUDA(cudaMemset(buffer[i], STARTS_ZEROED[i] ? 0 : 0xFF, BUFFER_BYTES[i]));  // 0xFF: NaN in every dtype
    }
  }
  void poison_output() {
    for (int i = O; i <= (HAS_LSE ? LSE : O); i++) EVOATTN_CUDA(cudaMemset(buffer[i], 0xFF, BUFFER_BYTES[i]));
  }
  Bytes read(int i, long begin, size_t size) const {
    Bytes bytes(size);
    EVOATTN_CUDA(cudaMemcpy(bytes.data(), (unsigned char*)buffer[i] + begin, size, cudaMemcpyDeviceToHost));
    return bytes;
  }
  bool guards_intact() const {
    for (int i = 0; i < BUFFERS; i++)
      for (long begin : {-long(GUARD_BYTES), long(BUFFER_BYTES[i])})
        for (unsigned char byte : read(i, begin, GUARD_BYTES))
          if (byte != GUARD_VALUE) {
            std::printf("FAIL: the kernel wrote outside buffer %d\n", i);
            return false;
          }
    return true;
  }
};

// Is the log-sum-exp right? -inf exactly where no key is seen; 2e-4 and 2e-5 of the largest are allowed
// (evoattn/reference.py).
inline bool judge_lse(const Device& device, const std::vector<Row>& rows) {
  if constexpr (!HAS_LSE) return true;
  const size_t count = size_t(BATCH * HEADS * SEQLEN_Q);
  const Bytes bytes = device.read(LSE, 0, count * sizeof(float));
  auto value = [&](size_t i) {
    float x;
    std::memcpy(&x, &bytes[4 * i], 4);
    return double(x);
  };
  double largest = 0, error = 0;
  size_t wrong = 0;
  for (size_t i = 0; i < count; i++) wrong += std::isnan(value(i));
  for (const Row& row : rows) {
    const double x = value(size_t((row.b * HEADS + row.h) * SEQLEN_Q + row.s));
    if (std::isinf(row.lse) || std::isinf(x)) wrong += x != row.lse;
    else largest = std::max(largest, std::fabs(row.lse)), error = std::max(error, std::fabs(x - row.lse));
  }
  const double allowed = 2e-4 + 2e-5 * largest;
  const bool right = wrong == 0 && error <= allowed;
  std::printf("%s log-sum-exp    max error %.3e (allowed %.3e), %zu NaN, never written or wrongly infinite\n",
              right ? "ok  " : "FAIL", error, allowed, wrong);
  return right;
}

// Is the output on the device right? Prints why, `when` it was made.
inline bool judge(const char* when, const Device& device, const std::vector<Row>& rows, const Allowed& allowed) {
  EVOATTN_CUDA(cudaDeviceSynchronize());
  const Bytes out = device.read(O, 0, BUFFER_BYTES[O]);
  size_t unwritten = 0, elements = BUFFER_BYTES[O] / ELEMENT_BYTES;
  for (size_t i = 0; i < elements; i++) unwritten += std::isnan(load(out, i));
  Error error{0, 0};
  for (const Row& row : rows)
    for (long d = 0; d < HEAD_DIM; d++) {
      double difference = std::fabs(double(load(out, offset(O_STRIDES, row.b, row.h, row.s) + d)) - row.exact[d]);
      error.largest = std::max(error.largest, difference), error.rms += difference * difference;
    }
  error.rms = std::sqrt(error.rms / (double(rows.size()) * HEAD_DIM));
  bool right = unwritten == 0 && error.largest <= allowed.largest && error.rms <= allowed.rms && device.guards_intact();
  std::printf(
      "%s %-14s max error %.3e (allowed %.3e), rms error %.3e (allowed %.3e), "
      "%zu of %zu outputs NaN or never written\n",
      right ? "ok  " : "FAIL", when, error.largest, allowed.largest, error.rms, allowed.rms, unwritten, elements);
  return judge_lse(device, rows) && right;
}

inline float elapsed_us(cudaEvent_t begin, cudaEvent_t end) {
  float ms;
  EVOATTN_CUDA(cudaEventSynchronize(end));
  EVOATTN_CUDA(cudaEventElapsedTime(&ms, begin, end));
  return ms * 1e3f;
}

// Sorted µs per call, each the mean over one replay of a CUDA graph of many calls; inputs warm in L2.
inline std::vector<float> time_calls(Device& device) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  EVOATTN_CUDA(cudaStreamCreate(&stream));
  EVOATTN_CUDA(cudaEventCreate(&begin));
  EVOATTN_CUDA(cudaEventCreate(&end));
  float once = 0;
  for (int warm_up = 0; warm_up < 3; warm_up++) {
    EVOATTN_CUDA(cudaEventRecord(begin, stream));
    launch(device.buffer, stream);
    EVOATTN_CUDA(cudaEventRecord(end, stream));
    once = elapsed_us(begin, end);
  }
  const int calls = std::max(1, std::min(MAX_CALLS, int(REPLAY_US / std::max(once, 1.0f))));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  EVOATTN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < calls; i++) launch(device.buffer, stream);
  EVOATTN_CUDA(cudaStreamEndCapture(stream, &graph));
  EVOATTN_CUDA(cudaGraphInstantiateWithFlags(&replay, graph, 0));
  for (int warm_up = 0; warm_up < 10; warm_up++) EVOATTN_CUDA(cudaGraphLaunch(replay, stream));
  std::vector<float> samples;
  for (int i = 0; i < SAMPLES; i++) {
    EVOATTN_CUDA(cudaEventRecord(begin, stream));
    EVOATTN_CUDA(cudaGraphLaunch(replay, stream));
    EVOATTN_CUDA(cudaEventRecord(end, stream));
    samples.push_back(elapsed_us(begin, end) / float(calls));
  }
  device.poison_output();  // so that the check after the timing sees what the timed graph writes
  EVOATTN_CUDA(cudaGraphLaunch(replay, stream));
  EVOATTN_CUDA(cudaStreamSynchronize(stream));
  std::sort(samples.begin(), samples.end());
  return samples;
}

inline int run() {
  cudaDeviceProp properties;
  int device_index, optin_bytes;
  EVOATTN_CUDA(cudaGetDevice(&device_index));
  EVOATTN_CUDA(cudaGetDeviceProperties(&properties, device_index));
  EVOATTN_CUDA(cudaDeviceGetAttribute(&optin_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index));
  std::printf("%s on %s (sm_%d%d)\n", PROBLEM, properties.name, properties.major, properties.minor);
  if (properties.major * 10 + properties.minor < MINIMUM_SM) {
    std::fprintf(stderr, "This kernel needs sm_%d or newer.\n", MINIMUM_SM);
    return 1;
  }
  if (LARGEST_SMEM > optin_bytes) {
    std::fprintf(stderr, "This kernel needs %d bytes of shared memory per block; this device allows %d.\n",
                 LARGEST_SMEM, optin_bytes);
    return 1;
  }
  allow_shared_memory();

  Device device;
  const Bytes inputs[3] = {random_tensor(BUFFER_BYTES[Q] / ELEMENT_BYTES, 1),
                           random_tensor(BUFFER_BYTES[K] / ELEMENT_BYTES, 2),
                           random_tensor(BUFFER_BYTES[V] / ELEMENT_BYTES, 3)};
  for (int i : {Q, K, V})
    EVOATTN_CUDA(cudaMemcpy(device.buffer[i], inputs[i].data(), BUFFER_BYTES[i], cudaMemcpyHostToDevice));

  std::vector<Row> rows = choose_rows();
  std::printf("CPU reference in double: %zu of %ld rows of O ...\n", rows.size(), BATCH * HEADS * SEQLEN_Q);
  const Allowed allowed = reference(rows, inputs[Q], inputs[K], inputs[V]);
  launch(device.buffer, 0);
  bool right = judge("before timing", device, rows, allowed);
  const std::vector<float> samples = time_calls(device);
  right = judge("after timing", device, rows, allowed) && right;
  for (int i : {Q, K, V})
    if (device.read(i, 0, BUFFER_BYTES[i]) != inputs[i]) {
      std::printf("FAIL: the kernel changed input %d\n", i);
      right = false;
    }

  const double median = samples[SAMPLES / 2];
  std::printf("%.3f us per call (p10 %.3f, p90 %.3f; %d graph replays), %.2f TFLOP/s\n", median, samples[SAMPLES / 10],
              samples[SAMPLES * 9 / 10], SAMPLES, FLOPS / median / 1e6);
  std::printf(right ? "RIGHT\n" : "WRONG\n");
  return right ? 0 : 1;
}
