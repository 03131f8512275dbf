// query_mask.cuh: which queries see a key: what mask.cuh says, asked from the other side.
#include "device/mask.cuh"

// Queries from `first` to before `end`.
struct Queries {
  int first, end;
  __device__ __forceinline__ bool contain(int query, int count) const { return query >= first && query + count <= end; }
};

template <bool CAUSAL, bool LOWER_RIGHT, bool WINDOWED> struct QueryMask : KeyMask<CAUSAL, LOWER_RIGHT, WINDOWED> {
  using Base = KeyMask<CAUSAL, LOWER_RIGHT, WINDOWED>;
  int seqlen_q;

  __device__ __forceinline__ QueryMask(int seqlen_q, int seqlen_k, const Window& window)
      : Base(seqlen_q, seqlen_k, window), seqlen_q(seqlen_q) {}

  // The first query that sees `key`, if there are so many: none before it does.
  __device__ __forceinline__ int first_query(int key) const { return CAUSAL ? max(0, key - this->offset) : 0; }
  // The end of the queries that see `key`: none from there on does.
  __device__ __forceinline__ int end_query(int key) const {
    return WINDOWED ? min(seqlen_q, key - this->lowest + 1) : seqlen_q;
  }
  // The queries that see all of `keys` keys from `key` on.
  __device__ __forceinline__ Queries that_see_all(int key, int keys) const {
    constexpr int MOST = 0x7fffffff;
    if (key + keys > this->seqlen_k) return {MOST, MOST};
    return {CAUSAL ? key + keys - 1 - this->offset : 0, WINDOWED ? key - this->lowest + 1 : MOST};
  }
};

// s = -inf where a query does not see a key, of Sᵀ on wgmma's accumulators: this lane has keys `key` and key + 8, of
// queries query + 2 t + 8 i and the next one.
template <int FLOATS, class Mask>
__device__ __forceinline__ void mask_transposed(float (&s)[FLOATS], const Mask& mask, int key, int query, int lane) {
  const int lane_query = query + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of = key + 8 * half;
    const bool exists = of < mask.seqlen_k;
    const int first = exists ? mask.first_query(of) - lane_query : FLOATS * 4, end = mask.end_query(of) - lane_query;
#pragma unroll
    for (int i = 2 * half; i < FLOATS; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = i / 4 * 8 + e;
        if (at < first || (Mask::WINDOW && at >= end)) s[i + e] = NEGATIVE_INFINITY;
      }
    }
  }
}
