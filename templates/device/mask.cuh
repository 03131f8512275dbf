// mask.cuh: which keys a query sees. All that the kernels know of masks stands here: a kernel asks how many keys a row
// sees, and whether the rows of a tile differ in it. Every mask so far shows a row the first of the keys, and a later
// row no fewer than an earlier one.

// Rows one below the other: how many of the keys from some key on each sees. `below` begins at a later row, `after`
// counts from a later key on. Numbers may be negative.
template <bool CAUSAL> struct KeysFrom {
  int first_row, all;  // keys that the first row sees by the diagonal; keys that there are

  __device__ __forceinline__ int of(int rows_below) const { return CAUSAL ? min(all, first_row + rows_below) : all; }
  __device__ __forceinline__ KeysFrom below(int rows) const { return {first_row + rows, all}; }
  __device__ __forceinline__ KeysFrom after(int keys) const { return {first_row - keys, all - keys}; }
};

// What KeyMask says of a row, with the offset computed at each use: a kernel that has both lengths in registers anyway
// needs none for the offset.
template <bool CAUSAL, bool LOWER_RIGHT> struct RowMask {
  int seqlen_q, seqlen_k;

  __device__ __forceinline__ int offset() const { return LOWER_RIGHT ? seqlen_k - seqlen_q : 0; }
  __device__ __forceinline__ int keys_of(int row) const {
    return CAUSAL ? min(seqlen_k, row + 1 + offset()) : seqlen_k;
  }
};

// CAUSAL: query i sees keys j <= i + offset, where offset is seqlen_k - seqlen_q for LOWER_RIGHT, else 0. Otherwise
// each query sees all keys.
template <bool CAUSAL, bool LOWER_RIGHT> struct KeyMask {
  static constexpr bool ROWS_DIFFER = CAUSAL;  // rows may see different keys
  static constexpr bool LAST_FIRST = CAUSAL;   // the last rows see most keys and start first: the end is then short
  using Keys = KeysFrom<CAUSAL>;
  using Rows = RowMask<CAUSAL, LOWER_RIGHT>;
  int seqlen_k, offset;

  __device__ __forceinline__ KeyMask(int seqlen_q, int seqlen_k)
      : seqlen_k(seqlen_k), offset(LOWER_RIGHT ? seqlen_k - seqlen_q : 0) {}

  // Keys that `row` sees, of the first `keys`; not above 0 if it sees none. All later rows see these too: a tile of
  // keys that ends there needs no masking from `row` on.
  __device__ __forceinline__ int keys_of(int row, int keys) const {
    return CAUSAL ? min(keys, row + 1 + offset) : keys;
  }
  __device__ __forceinline__ int keys_of(int row) const { return keys_of(row, seqlen_k); }
  // Keys that some row before `end_row` sees.
  __device__ __forceinline__ int keys_before(int end_row) const {
    return CAUSAL ? min(seqlen_k, end_row + offset) : seqlen_k;
  }
  // ROWS_DIFFER: the last key that `row` sees, if there are so many.
  __device__ __forceinline__ int last_key(int row) const { return row + offset; }
  // Keys from `key` on that `row` and the rows below it see.
  __device__ __forceinline__ Keys keys_from(int row, int key) const { return {row + 1 + offset - key, seqlen_k - key}; }
};
