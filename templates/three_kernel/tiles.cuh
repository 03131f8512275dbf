// tiles.cuh: probabilities relative to the row maxima of their own tile, and what undoes it. Needs the constants of
// three_kernel.cu.j2.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "three_kernel/parts.cuh"

constexpr int REFERENCE_KEYS = BLOCK_N / WARPS_N;  // keys of a row with a common reference: those of one warp of Q Kᵀ
// A tile this far below the maximum of its row counts as if it were no further: its keys weigh 2^-40 then, which no
// answer shows.
constexpr float LOWEST_REFERENCE = -40.f;

__device__ __forceinline__ int64_t tile_row(int64_t batch_head, int reference, int row, int seqlen_q, int seqlen_k) {
  return (batch_head * ((seqlen_k + REFERENCE_KEYS - 1) / REFERENCE_KEYS) + reference) * seqlen_q + row;
}

// s = 2^(s · scale - m) for rows g and g + 8 of a warp, and tiles_gmem = (m, Σ s) with m = max s · scale of the row;
// accumulators in the order of mma's c. Element e of tile n is key `key_of(n, e)` from this lane's first, of which row
// g sees `visible[0]`.
template <int FLOATS, typename KeyOf>
__device__ __forceinline__ void tile_softmax(float (&s)[FLOATS], float scale, const int (&visible)[2], KeyOf key_of,
                                             float2* tiles_gmem,  // [rows]: row g of the warp
                                             int valid_rows, int lane) {
  constexpr int TILES = FLOATS / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (visible[half] <= key_of(TILES - 1, 1)) {  // an edge of the matrix or of the mask
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (key_of(n, e) >= visible[half]) s[4 * n + 2 * half + e] = NEGATIVE_INFINITY;
        }
    }
    float maximum = NEGATIVE_INFINITY, sum = 0.f;
#pragma unroll
    for (int n = 0; n < TILES; ++n) maximum = fmaxf(maximum, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));  // the four lanes of a row
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2)) * scale;
    const float shift = maximum == NEGATIVE_INFINITY ? 0.f : maximum;  // the row sees no key of the tile
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * n + 2 * half + e];
        x = exp2_approx(fmaf(x, scale, -shift));
        sum += x;
      }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0 && half * 8 < valid_rows) tiles_gmem[half * 8] = make_float2(maximum, sum);
  }
}

// One row's (m_t, l_t) of all its tiles t to (2^(r_{t-1} - r_t), l_t) with r_t = max(m_t, m - 40) and m = max_t m_t:
// multiplied by it before the keys of tile t are added, O is always relative to the tile at hand, exact and with one
// product per tile. Returns m and Σ_t 2^(m_t - m) l_t, the latter relative to the last tile, as O is in the end.
__device__ __forceinline__ float2 merge_tiles(float2* tiles_gmem,  // [references, seqlen_q]: column of the row
                                              int query, int seqlen_q, int seqlen_k) {
  constexpr int TOGETHER = 8;  // loads that are under way together
  const int references = (keys_read(query, 1, seqlen_q, seqlen_k) + REFERENCE_KEYS - 1) / REFERENCE_KEYS;
  float2 tiles[TOGETHER];
  auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      tiles[i] =
          first + i < references ? tiles_gmem[int64_t(first + i) * seqlen_q] : make_float2(NEGATIVE_INFINITY, 0.f);
    }
  };
  float maximum = NEGATIVE_INFINITY;
  for (int first = (references - 1) / TOGETHER * TOGETHER; first >= 0;
       first -= TOGETHER) {  // the first tiles last: they are needed next
    load(first);
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) maximum = fmaxf(maximum, tiles[i].x);
  }
  if (maximum == NEGATIVE_INFINITY) maximum = 0.f;  // the row sees no key: its sum is 0
  const float lowest = maximum + LOWEST_REFERENCE;
  float sum = 0.f, before = lowest;
  for (int first = 0; first < references; first += TOGETHER) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if (first + i < references) {
        const float reference = fmaxf(tiles[i].x, lowest);
        sum = fmaf(tiles[i].y, exp2_approx(tiles[i].x - maximum), sum);
        tiles_gmem[int64_t(first + i) * seqlen_q].x = exp2_approx(before - reference);
        before = reference;
      }
    }
  }
  return make_float2(maximum, sum * exp2_approx(maximum - before));
}

// MERGE_LATE: the same for rows g and g + 8 of a warp by P V itself, as it comes to each tile and with nothing written;
// the four lanes of a row share it.
struct RowMerge {
  const float2* tiles_gmem;                            // [references, seqlen_q]: column of row g
  int references, seqlen_q, valid_rows;                // from row g on
  float lowest[2], reference[2], sum[2] = {0.f, 0.f};  // Σ l, relative to `reference`, as O is
  float2 next[2];  // (m, l) of the next tile, on its way while the one before is multiplied

  __device__ __forceinline__ float2 load(int tile, int half) const {
    if (tile >= references || half * 8 >= valid_rows) return make_float2(NEGATIVE_INFINITY, 0.f);
    return tiles_gmem[int64_t(tile) * seqlen_q + half * 8];
  }
  __device__ __forceinline__ void start(int lane) {
    float maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
    next[0] = load(0, 0), next[1] = load(0, 1);
    for (int t = lane % 4; t < references; t += 16) {
      float m[2][4];  // loads that are under way together
#pragma unroll
      for (int i = 0; i < 8; ++i) m[i % 2][i / 2] = load(t + i / 2 * 4, i % 2).x;
#pragma unroll
      for (int i = 0; i < 8; ++i) maximum[i % 2] = fmaxf(maximum[i % 2], m[i % 2][i / 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], 1));
      maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], 2));
      reference[half] = lowest[half] = (maximum[half] == NEGATIVE_INFINITY ? 0.f : maximum[half]) + LOWEST_REFERENCE;
    }
  }
  // Goes on to the tile that is `next`; returns what O is multiplied by.
  __device__ __forceinline__ float step(int half) {
    const float before = reference[half];
    reference[half] = fmaxf(next[half].x, lowest[half]);
    const float factor = exp2_approx(before - reference[half]);
    sum[half] = fmaf(sum[half], factor, next[half].y * exp2_approx(next[half].x - reference[half]));
    return factor;
  }
};
