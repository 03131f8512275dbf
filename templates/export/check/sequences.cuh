// sequences.cuh: which queries and keys each sequence has, and where they lie.
#include "export/check/inputs.cuh"

constexpr int NO_PAGE = 0x3FFFFFFF;  // behind the last key in use: far outside of every cache

// The key from which query 0 counts, and with a causal mask the last one that it sees.
inline long diagonal(long b) { return LOWER_RIGHT ? KEYS[b] - QUERIES[b] : 0; }

// The keys, from the first on, that a causal mask or none shows query `s`; 0 or less for none.
inline long keys_up_to(long b, long s) { return CAUSAL ? std::min(KEYS[b], s + diagonal(b) + 1) : KEYS[b]; }

// Of the first two dimensions of Q, K, V or O: a batch or a page, and a row of it.
struct Place {
  long batch, row;
};

struct Sequences {
  std::vector<int> used;                      // keys of each sequence
  std::vector<int> query_starts, key_starts;  // of packed sequences, and where the last one ends
  std::vector<int> table;                     // [BATCH, TABLE_PAGES]

  Place query(long b, long s) const {
    if constexpr (PACKED) return {0, query_starts[b] + s};
    return {b, s};
  }
  Place key(long b, long j) const {
    if constexpr (TABLE_PAGES > 0) return {table[b * TABLE_PAGES + j / PAGE], j % PAGE};
    if constexpr (PACKED) return {0, key_starts[b] + j};
    return {b, j};
  }
};

inline std::vector<int> starts(const long (&lengths)[BATCH]) {
  std::vector<int> sums(1, 0);
  for (long length : lengths) sums.push_back(sums.back() + int(length));
  return sums;
}

// Pages in random order.
inline Sequences make_sequences() {
  Sequences made{{KEYS, KEYS + BATCH}, starts(QUERIES), starts(KEYS), {}};
  for (long page = 0; page < BATCH * TABLE_PAGES; page++) made.table.push_back(int(page));
  unsigned long long state = 7;
  for (size_t n = made.table.size(); n > 1; n--) std::swap(made.table[n - 1], made.table[next_random(state) % n]);
  for (long b = 0; b < BATCH; b++)
    for (long i = 0; i < TABLE_PAGES; i++)
      if (i * PAGE >= KEYS[b]) made.table[b * TABLE_PAGES + i] = NO_PAGE;
  return made;
}

// K or V as a kernel finds it: NaN in every row that holds no key in use.
inline Bytes with_keys_in_use(Bytes tensor, const long (&strides)[3], long columns, const Sequences& sequences) {
  if constexpr (SEQUSED < 0) return tensor;
  Bytes kept(tensor.size(), 0xFF);
  for (long b = 0; b < BATCH; b++)
    for (long j = 0; j < KEYS[b]; j++)
      for (long h = 0; h < KV_HEADS; h++) {
        const Place place = sequences.key(b, j);
        const size_t first = offset(strides, place.batch, h, place.row) * ELEMENT_BYTES;
        std::copy_n(tensor.begin() + long(first), columns * ELEMENT_BYTES, kept.begin() + long(first));
      }
  return kept;
}

inline Bytes bytes_of(const std::vector<int>& numbers) {
  Bytes bytes(numbers.size() * sizeof(int));
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}
