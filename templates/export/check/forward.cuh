// forward.cuh: the inputs of the forward pass, its answer by the CPU, and whether what the kernel wrote is right.
#include "export/check/device.cuh"
#include "export/check/reference.cuh"

struct Error {
  double largest, rms;
};

// Is the log-sum-exp right? -inf exactly where no key is seen; 2e-4 and 2e-5 of the largest are allowed
// (evoattn/correctness/reference.py).
inline bool judge_lse(const Device& device, const std::vector<Row>& rows, const Sequences& sequences) {
  if constexpr (!HAS_LSE) return true;
  const size_t count = BUFFER_BYTES[LSE] / sizeof(float);
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
    const Place at = sequences.query(row.b, row.s);
    const double x = value(size_t((at.batch * HEADS + row.h) * ROWS + at.row));
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
inline bool judge(const char* when, const Device& device, const std::vector<Row>& rows, const Allowed& allowed,
                  const Sequences& sequences) {
  EVOATTN_CUDA(cudaDeviceSynchronize());
  const Bytes out = device.read(O, 0, BUFFER_BYTES[O]);
  size_t unwritten = 0, elements = BUFFER_BYTES[O] / ELEMENT_BYTES;
  for (size_t i = 0; i < elements; i++) unwritten += std::isnan(load(out, i));
  Error error{0, 0};
  for (const Row& row : rows) {
    const Place at = sequences.query(row.b, row.s);
    const size_t first = offset(O_STRIDES, at.batch, row.h, at.row);
    for (long d = 0; d < VALUE_DIM; d++) {
      double difference = std::fabs(double(load(out, first + d)) - row.exact[d]);
      error.largest = std::max(error.largest, difference), error.rms += difference * difference;
    }
  }
  error.rms = std::sqrt(error.rms / (double(rows.size()) * VALUE_DIM));
  bool right = unwritten == 0 && error.largest <= allowed.largest && error.rms <= allowed.rms && device.guards_intact();
  std::printf(
      "%s %-14s max error %.3e (allowed %.3e), rms error %.3e (allowed %.3e), "
      "%zu of %zu outputs NaN or never written\n",
      right ? "ok  " : "FAIL", when, error.largest, allowed.largest, error.rms, allowed.rms, unwritten, elements);
  return judge_lse(device, rows, sequences) && right;
}

struct Proof {
  Terms terms = random_terms();
  Sequences sequences = make_sequences();
  Inputs inputs = make_inputs(terms, sequences);
  std::vector<Row> rows = choose_rows();
  Allowed allowed;

  Proof() {
    std::printf("CPU reference in double: %zu of %ld rows of O ...\n", rows.size(),
                long(BUFFER_BYTES[O] / ELEMENT_BYTES) / VALUE_DIM);
    allowed = reference(rows, inputs[Q].second, inputs[K].second, inputs[V].second, terms, sequences);
  }
  bool right(const char* when, const Device& device) const { return judge(when, device, rows, allowed, sequences); }
};
