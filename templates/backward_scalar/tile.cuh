// tile.cuh: a tile of queries and a tile of keys in shared memory, their P and dS, and products of these. Needs the
// constants of backward_scalar.cu.j2.

// A product of ROWS × COLUMNS: a thread has EACH rows side by side, and of these every SIDE-th column.
template <int ROWS, int COLUMNS> struct Product {
  static constexpr int GROUPS = ROWS / EACH, SIDE = THREADS / GROUPS, MINE = (COLUMNS + SIDE - 1) / SIDE;
  static_assert(GROUPS * SIDE == THREADS, "the threads share the rows evenly");
  float sum[EACH][MINE];

  static __device__ __forceinline__ int row() { return threadIdx.x / SIDE * EACH; }
  static __device__ __forceinline__ int column(int i) { return threadIdx.x % SIDE + i * SIDE; }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
#pragma unroll
      for (int i = 0; i < MINE; ++i) sum[e][i] = 0.f;
    }
  }
  // += Aᵀ B: `a` has `depth` rows of ROWS numbers, `b` as many of COLUMNS.
  __device__ __forceinline__ void add(const float* a, int a_stride, const float* b, int b_stride, int depth) {
#pragma unroll 2
    for (int k = 0; k < depth; ++k) {
      const float4 four = *reinterpret_cast<const float4*>(a + k * a_stride + row());
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        const float x = COLUMNS % SIDE == 0 || column(i) < COLUMNS ? b[k * b_stride + column(i)] : 0.f;
        sum[0][i] = fmaf(four.x, x, sum[0][i]), sum[1][i] = fmaf(four.y, x, sum[1][i]);
        sum[2][i] = fmaf(four.z, x, sum[2][i]), sum[3][i] = fmaf(four.w, x, sum[3][i]);
      }
    }
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
#pragma unroll
      for (int i = 0; i < MINE; ++i) sum[e][i] *= factor;
    }
  }
  // Add a product of as many rows and no more columns.
  template <int OTHER> __device__ __forceinline__ void join(const Product<ROWS, OTHER>& other) {
    constexpr int BOTH = MINE < Product<ROWS, OTHER>::MINE ? MINE : Product<ROWS, OTHER>::MINE;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
#pragma unroll
      for (int i = 0; i < BOTH; ++i) sum[e][i] += column(i) < OTHER ? other.sum[e][i] : 0.f;
    }
  }
  // The first `rows` rows.
  __device__ __forceinline__ void store(Element* gmem, int64_t row_stride, int rows) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        if (row() + e < rows && column(i) < COLUMNS)
          gmem[(row() + e) * row_stride + column(i)] = from_float<Element>(sum[e][i]);
      }
    }
  }
};

// BY_KEYS: P and dS lie as rows of keys for each query, else dS as rows of queries for each key, and P nowhere.
template <bool BY_KEYS> struct Tile {
  static constexpr int STRIDE = HEAD_DIM + 4, VALUE_STRIDE = VALUE_DIM + 4;  // floats: no bank conflict of 16 bytes
  static constexpr int SCORE_STRIDE = (BY_KEYS ? BLOCK_N : BLOCK_M) + 4;
  static constexpr int SCORES = BLOCK_M * (BLOCK_N + 4) > BLOCK_N*(BLOCK_M + 4) ? BLOCK_M*(BLOCK_N + 4)
                                                                                : BLOCK_N*(BLOCK_M + 4);
  static constexpr int FLOATS = (BLOCK_M + BLOCK_N) * (STRIDE + VALUE_STRIDE) + 2 * SCORES + 2 * BLOCK_M;
  float *q, *k, *v, *d, *p, *ds, *log_sums, *deltas;
  const Place& place;
  const Mask& mask;

  __device__ __forceinline__ Tile(float* smem, const Place& place, const Mask& mask)
      : q(smem),
        k(q + BLOCK_M * STRIDE),
        v(k + BLOCK_N * STRIDE),
        d(v + BLOCK_N * VALUE_STRIDE),
        p(d + BLOCK_M * VALUE_STRIDE),
        ds(p + SCORES),
        log_sums(ds + SCORES),
        deltas(log_sums + BLOCK_M),
        place(place),
        mask(mask) {}

  // ROWS rows of DIM numbers, 0 from row `rows` on: NaN may lie there.
  template <int ROWS, int DIM>
  static __device__ __forceinline__ void load(float* smem, const Element* gmem, int64_t row_stride, int rows) {
    for (int i = threadIdx.x; i < ROWS * DIM; i += THREADS) {
      const int row = i / DIM, column = i % DIM;
      smem[row * (DIM + 4) + column] = row < rows ? to_float(gmem[row * row_stride + column]) : 0.f;
    }
  }
  __device__ __forceinline__ void load_keys(const Strided<const Element>& k_of, const Strided<const Element>& v_of,
                                            int kv_head, int first) const {
    const int row = place.first_key + first, rows = place.keys - first;
    load<BLOCK_N, HEAD_DIM>(k, k_of.row(place.batch, kv_head, row), k_of.row_stride, rows);
    load<BLOCK_N, VALUE_DIM>(v, v_of.row(place.batch, kv_head, row), v_of.row_stride, rows);
  }
  // Rows that see no key, or are none, get a log-sum-exp of +inf: their P is 0.
  __device__ __forceinline__ void load_queries(const Strided<const Element>& q_of, const Strided<const Element>& d_of,
                                               const float* lse_gmem, const float* deltas_gmem, int head, int first,
                                               const Problem& problem) const {
    const int row = place.first_query + first, rows = place.queries - first;
    load<BLOCK_M, HEAD_DIM>(q, q_of.row(place.batch, head, row), q_of.row_stride, rows);
    load<BLOCK_M, VALUE_DIM>(d, d_of.row(place.batch, head, row), d_of.row_stride, rows);
    const int64_t sums = (int64_t(place.batch) * problem.heads + head) * problem.query_rows + row;
    for (int i = threadIdx.x; i < BLOCK_M; i += THREADS) {
      const float lse = i < rows ? lse_gmem[sums + i] : NEGATIVE_INFINITY;
      log_sums[i] = lse == NEGATIVE_INFINITY ? -NEGATIVE_INFINITY : lse * LOG2_E;
      deltas[i] = i < rows ? deltas_gmem[sums + i] : 0.f;
    }
  }

  // P and dS of the tile; `dbias` gets what each pair adds to the gradient of the bias, if it is given: it points to
  // the tile's first query.
  __device__ __forceinline__ void scores(const Score& score, int head, int first_query, int first_key, float scale,
                                         float* dbias, int bias_columns) const {
    using Pairs = Product<BLOCK_M, BLOCK_N>;
    Pairs products, values;
    multiply<HEAD_DIM>(products, q, k);
    multiply<VALUE_DIM>(values, d, v);
    const int diagonal = Mask::ENDS_WITH_KEYS ? place.keys - place.queries : 0;
#pragma unroll
    for (int i = 0; i < Pairs::MINE; ++i) {
      const int column = Pairs::column(i), key = first_key + column;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int row = Pairs::row() + e, query = first_query + row;
        const float raw = products.sum[e][i] * scale;
        const bool seen =
            key < place.keys && query < place.queries && key >= mask.first_key(query) && key < mask.keys_of(query);
        float weight = 0.f, shift = 0.f;
        if (seen) {
          const float changed = score.of(raw, place.number, head, query, key, diagonal);
          weight = exp2_approx(fmaf(changed, LOG2_E, -log_sums[row]));
        }
        if (weight != 0.f) {  // the derivative at a hidden score may be no number
          shift = weight * (values.sum[e][i] - deltas[row]);
          if (BIAS_GRADIENT && dbias) {
            dbias[row * int64_t(bias_columns) + key] +=
                shift * score.slope_behind_bias(raw, place.number, head, query, key, diagonal);
          }
          shift *= score.slope(raw, place.number, head, query, key, diagonal);
        }
        if constexpr (BY_KEYS) {
          p[row * SCORE_STRIDE + column] = weight;
          ds[row * SCORE_STRIDE + column] = shift;
        } else {
          ds[column * SCORE_STRIDE + row] = shift;
        }
      }
    }
  }

  // x = rows of `a` times rows of `b`, of DIM numbers.
  template <int DIM, class Pairs>
  static __device__ __forceinline__ void multiply(Pairs& x, const float* a, const float* b) {
    x.clear();
#pragma unroll 2
    for (int k = 0; k < DIM; k += 4) {
      float4 of_rows[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e)
        of_rows[e] = *reinterpret_cast<const float4*>(a + (Pairs::row() + e) * (DIM + 4) + k);
#pragma unroll
      for (int i = 0; i < Pairs::MINE; ++i) {
        const float4 y = *reinterpret_cast<const float4*>(b + Pairs::column(i) * (DIM + 4) + k);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          x.sum[e][i] = fmaf(of_rows[e].x, y.x, x.sum[e][i]);
          x.sum[e][i] = fmaf(of_rows[e].y, y.y, x.sum[e][i]);
          x.sum[e][i] = fmaf(of_rows[e].z, y.z, x.sum[e][i]);
          x.sum[e][i] = fmaf(of_rows[e].w, y.w, x.sum[e][i]);
        }
      }
    }
  }
};
