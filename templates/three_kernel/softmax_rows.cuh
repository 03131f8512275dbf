// softmax_rows.cuh: the softmax over whole rows of S. Needs the constants of three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/copy/vector.cuh"
#include "three_kernel/row_reduce.cuh"
#include "three_kernel/parts.cuh"

constexpr int SOFTMAX_THREADS = THREADS_PER_ROW * ROWS_PER_BLOCK;

// P = 2^(S - m) with m = max_j S of the row, and rows_gmem = (m, Σ_j P); with EXPONENTS_LATE the latter only. P may lie
// where S lies: a score is read, and its probability written, by one thread.
extern "C" __global__ void __launch_bounds__(SOFTMAX_THREADS)
    three_kernel_softmax(const Score* s_gmem,                                       // [rows, score_stride]
                         Element* p_gmem,                                           // [rows, score_stride]
                         float2* rows_gmem,                                         // [rows]
                         int rows, int seqlen_q, int seqlen_k, int score_stride) {  // rows = batch · heads · seqlen_q
  __shared__ float maxima_smem[SOFTMAX_THREADS / 32], sums_smem[SOFTMAX_THREADS / 32];
  next_may_begin<false>();
  const int block = ZIGZAG ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // P V goes forward again
  const int row = block * ROWS_PER_BLOCK + threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
  int keys = seqlen_k, keys_written = seqlen_k;  // the row sees the first; the others get the probability 0
  if constexpr (Mask::ROWS_DIFFER) {
    const int query = row % seqlen_q;
    keys = max(0, Mask(seqlen_q, seqlen_k).keys_of(query));
    keys_written = keys_read(query, 1, seqlen_q, seqlen_k);
  }
  keys_written = min(score_stride, (keys_written + KEYS_WRITTEN_STEP - 1) / KEYS_WRITTEN_STEP * KEYS_WRITTEN_STEP);
  if (row >= rows) keys = keys_written = 0;  // past the end; the barriers still need the thread
  s_gmem += int64_t(row) * score_stride;
  p_gmem += int64_t(row) * score_stride;

  auto first_key = [&](int i) { return (thread + i * THREADS_PER_ROW) * VECTOR_WIDTH; };  // of vector i of this thread
  auto load = [&](float(&s)[VECTOR_WIDTH], int key) {
    to_floats(load_vector<VECTOR_WIDTH>(s_gmem + key), s);
#pragma unroll
    for (int e = 0; e < VECTOR_WIDTH; ++e) {
      if (key + e >= keys) s[e] = NEGATIVE_INFINITY;
    }
  };
  wait_for_kernels_before();
  float kept[KEPT_VECTORS][VECTOR_WIDTH], maximum = NEGATIVE_INFINITY;
  auto raise = [&](const float(&s)[VECTOR_WIDTH]) {
#pragma unroll
    for (int e = 0; e < VECTOR_WIDTH; ++e) maximum = fmaxf(maximum, s[e]);
  };
#pragma unroll
  for (int i = 0; i < KEPT_VECTORS; ++i) {
    if (first_key(i) < keys) {
      load(kept[i], first_key(i));
    } else {
#pragma unroll
      for (int e = 0; e < VECTOR_WIDTH; ++e) kept[i][e] = NEGATIVE_INFINITY;
    }
  }
#pragma unroll
  for (int i = 0; i < KEPT_VECTORS; ++i) raise(kept[i]);
  for (int i = KEPT_VECTORS; first_key(i) < keys; ++i) {
    float s[VECTOR_WIDTH];
    load(s, first_key(i));
    raise(s);
  }
  next_may_begin<true>();
  maximum = row_reduce<THREADS_PER_ROW>(maximum, maxima_smem, [](float a, float b) { return fmaxf(a, b); });
  const float shift = maximum == NEGATIVE_INFINITY ? 0.f : maximum;  // the row sees no key: its sum is 0

  float sum = 0.f;
  auto finish = [&](const float(&s)[VECTOR_WIDTH], int key) {
    float p[VECTOR_WIDTH];
#pragma unroll
    for (int e = 0; e < VECTOR_WIDTH; ++e) {
      p[e] = exp2_approx(s[e] - shift);
      sum += p[e];
    }
    if (!EXPONENTS_LATE && key < keys_written) store_floats(p_gmem + key, p);
  };
#pragma unroll
  for (int i = 0; i < KEPT_VECTORS; ++i) finish(kept[i], first_key(i));
  for (int i = KEPT_VECTORS; first_key(i) < keys_written; ++i) {
    float s[VECTOR_WIDTH];
#pragma unroll
    for (int e = 0; e < VECTOR_WIDTH; ++e) s[e] = NEGATIVE_INFINITY;
    if (first_key(i) < keys) load(s, first_key(i));
    finish(s, first_key(i));
  }
  sum = row_reduce<THREADS_PER_ROW>(sum, sums_smem, [](float a, float b) { return a + b; });
  if (thread == 0 && row < rows) rows_gmem[row] = make_float2(shift, sum);
}
