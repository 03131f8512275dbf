// problem.cuh: sizes and places of the tensors, as the launches for keys and for queries take them. Needs the constants
// of backward_scalar.cu.j2.

struct Problem {
  int heads, seqlen_q, seqlen_k;                   // the longest, of packed sequences
  int query_rows;                                  // of a head of Q and of its log-sum-exps: of all packed sequences
  int sequences;                                   // batches, or packed sequences
  const int *seqused, *query_starts, *key_starts;  // SEQUSED: [batch]; VARLEN: [sequences + 1]
};
#define PROBLEM_PARAMETERS                                                                                            \
  int heads, int kv_heads, int seqlen_q, int seqlen_k, int query_rows, int sequences, int window_past,                \
      int window_ahead, float softmax_scale, const Element *__restrict__ sinks_gmem, const int *__restrict__ seqused, \
      const int *__restrict__ query_starts, const int *__restrict__ key_starts
#define PROBLEM_ARGUMENTS {heads, seqlen_q, seqlen_k, query_rows, sequences, seqused, query_starts, key_starts}
#define STRIDE_PARAMETERS(tensor) \
  int64_t tensor##_batch_stride, int64_t tensor##_head_stride, int64_t tensor##_row_stride
#define STRIDES(tensor) tensor##_batch_stride, tensor##_head_stride, tensor##_row_stride

// A tensor [batch, heads, rows, dim] whose strides are in elements.
template <typename T> struct Strided {
  T* gmem;
  int64_t batch_stride, head_stride, row_stride;
  __device__ __forceinline__ T* row(int batch, int head, int row) const {
    return gmem + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// A batch, or a packed sequence: how long it is, and where it begins.
struct Place {
  int number, batch;         // among all; in the tensors
  int first_query, queries;  // rows
  int first_key, keys;       // keys: in use
  int key_rows;              // rows of K, in use or not

  __device__ __forceinline__ Place(const Problem& problem, int number)
      : number(number),
        batch(VARLEN ? 0 : number),
        first_query(0),
        queries(problem.seqlen_q),
        first_key(0),
        keys(problem.seqlen_k),
        key_rows(problem.seqlen_k) {
    if constexpr (SEQUSED) keys = max(0, min(keys, problem.seqused[number]));
    if constexpr (VARLEN) {  // one that ends before it begins has no rows
      first_query = problem.query_starts[number], first_key = problem.key_starts[number];
      queries = max(0, min(queries, problem.query_starts[number + 1] - first_query));
      keys = key_rows = max(0, min(keys, problem.key_starts[number + 1] - first_key));
    }
  }
};

// dsink = -Σ exp(sink - lse) · delta over all queries of a head, by one block.
__device__ __forceinline__ void sum_of_sink(float* smem, float* dsinks_gmem, const Element* sinks_gmem,
                                            const float* lse_gmem, const float* deltas_gmem, int head,
                                            const Problem& problem) {
  const float sink = to_float(sinks_gmem[head]);
  const int batches = VARLEN ? 1 : problem.sequences;
  float sum = 0.f;
  for (int batch = 0; batch < batches; ++batch) {
    const int64_t first = (int64_t(batch) * problem.heads + head) * problem.query_rows;
    for (int row = threadIdx.x; row < problem.query_rows; row += THREADS) {
      const float lse = lse_gmem[first + row];
      if (lse != NEGATIVE_INFINITY) sum = fmaf(-exp2_approx((sink - lse) * LOG2_E), deltas_gmem[first + row], sum);
    }
  }
  smem[threadIdx.x] = sum;
#pragma unroll
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) smem[threadIdx.x] += smem[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dsinks_gmem[head] = smem[0];
  __syncthreads();  // the next head's sums come into the same places
}
