// mask.cuh: which keys a query sees. All that the kernels know of masks stands here: a kernel asks up to which key a
// row sees, with WINDOW from which key on, and whether the rows of a tile differ in it. Both ends rise by one from a
// row to the next, or are the same for all.

// Rows one below the other: how many of the keys from some key on each sees. `below` begins at a later row, `after`
// counts from a later key on. Numbers may be negative.
template <bool CAUSAL, bool WINDOWED = false> struct KeysFrom {
  static constexpr bool WINDOW = false;
  int first_row, all;  // keys that the first row sees by the diagonal; keys that there are

  __device__ __forceinline__ int of(int rows_below) const { return CAUSAL ? min(all, first_row + rows_below) : all; }
  __device__ __forceinline__ KeysFrom below(int rows) const { return {first_row + rows, all}; }
  __device__ __forceinline__ KeysFrom after(int keys) const { return {first_row - keys, all - keys}; }
};
// The same under a window, whose first keys are hidden too.
template <> struct KeysFrom<true, true> {
  static constexpr bool WINDOW = true;
  int first_row, all, hidden;  // hidden: keys before those that the first row sees; more may be hidden than there are

  __device__ __forceinline__ int of(int rows_below) const { return min(all, first_row + rows_below); }
  __device__ __forceinline__ int hidden_of(int rows_below) const { return hidden + rows_below; }
  __device__ __forceinline__ KeysFrom below(int rows) const { return {first_row + rows, all, hidden + rows}; }
  __device__ __forceinline__ KeysFrom after(int keys) const { return {first_row - keys, all - keys, hidden - keys}; }
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

// Where a lane begins in a tile.
struct FirstPair {
  int batch, head, row, key;
};

// Keys beside the diagonal that a window shows.
struct Window {
  int past = 0, ahead = 0;
};

// CAUSAL: query i sees keys j <= i + offset, where offset is seqlen_k - seqlen_q for LOWER_RIGHT, else 0. WINDOWED: of
// these only j >= i + offset - past, and those up to i + offset + ahead. Otherwise each query sees all keys.
template <bool CAUSAL, bool LOWER_RIGHT, bool WINDOWED = false> struct KeyMask {
  static_assert(CAUSAL || !WINDOWED, "a window ends somewhere");
  static constexpr bool WINDOW = WINDOWED;
  static constexpr bool ROWS_DIFFER = CAUSAL;  // rows may see different keys
  static constexpr bool LAST_FIRST = CAUSAL;   // the last rows see most keys and start first: the end is then short
  static constexpr bool ENDS_WITH_KEYS = !CAUSAL || LOWER_RIGHT;  // distances count from the last key
  using Keys = KeysFrom<CAUSAL, WINDOWED>;
  using Rows = RowMask<CAUSAL, LOWER_RIGHT>;
  int seqlen_k, offset, lowest;  // a row sees keys from row + lowest on (WINDOWED) to row + offset

  __device__ __forceinline__ KeyMask(int seqlen_q, int seqlen_k, const Window& window = {})
      : seqlen_k(seqlen_k),
        offset((LOWER_RIGHT ? seqlen_k - seqlen_q : 0) + (WINDOWED ? window.ahead : 0)),
        lowest((LOWER_RIGHT ? seqlen_k - seqlen_q : 0) - window.past) {}

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
  // The first key that `row` sees, if there are so many: those before it are hidden from later rows too.
  __device__ __forceinline__ int first_key(int row) const { return WINDOWED ? max(0, row + lowest) : 0; }
  // ROWS_DIFFER: the last key that `row` sees, if there are so many.
  __device__ __forceinline__ int last_key(int row) const { return row + offset; }
  // Keys from `key` on that `row` and the rows below it see.
  __device__ __forceinline__ Keys keys_from(int row, int key) const {
    if constexpr (WINDOWED) return {row + 1 + offset - key, seqlen_k - key, row + lowest - key};
    else return {row + 1 + offset - key, seqlen_k - key};
  }
};
