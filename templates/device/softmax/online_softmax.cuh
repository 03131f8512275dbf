// online_softmax.cuh: scores of one tile of keys to exponents of 2 that are never positive, with O and its sums kept in
// step.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"
#include "device/mask.cuh"
#include "device/mma/flash_fragments.cuh"

enum class Rescale {
  ALWAYS,  // shift = row maximum; O and sums are rescaled after every tile
  VOTE,    // the same, but only if a row maximum of the warp grew
  LAZY,    // shift = LAZY_OCTAVES above the first maximum; O and sums are rescaled only if a score reaches it
};
// P then begins at 2^-5, far above the 2^-14 below which fp16 loses bits, and scores may grow 32-fold in weight before
// the shift must rise.
constexpr float LAZY_OCTAVES = 5.f;

// s = -inf for keys that a row does not see. `visible`: of the keys from this lane's first on, row g of row tile 0
// being the first row.
template <int ROW_TILES, int KEY_TILES, class Keys>
__device__ __forceinline__ void mask_scores(float (&s)[ROW_TILES][KEY_TILES][4], const Keys& visible) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int keys = visible.below(m * 16).of(half * 8);
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        if (n * 8 >= keys) s[m][n][2 * half] = NEGATIVE_INFINITY;
        if (n * 8 + 1 >= keys) s[m][n][2 * half + 1] = NEGATIVE_INFINITY;
      }
      if constexpr (Keys::WINDOW) {
        const int hidden = visible.below(m * 16).hidden_of(half * 8);
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
          if (n * 8 < hidden) s[m][n][2 * half] = NEGATIVE_INFINITY;
          if (n * 8 + 1 < hidden) s[m][n][2 * half + 1] = NEGATIVE_INFINITY;
        }
      }
    }
}

// What `terms` make of the scores: `row_terms(row)` are those of the keys from this lane's first on, `row` counting
// from row g of row tile 0.
template <int ROW_TILES, int KEY_TILES, class Terms, typename RowTerms>
__device__ __forceinline__ void change_scores(float (&s)[ROW_TILES][KEY_TILES][4], const Terms& terms,
                                              RowTerms row_terms) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto row = row_terms(m * 16 + half * 8);
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) terms.of_pair(s[m][n][2 * half], s[m][n][2 * half + 1], row, n * 8);
    }
}

// Maxima of rows g and g + 8 over the warp's keys: the four lanes of a row hold different keys.
template <int KEY_TILES> __device__ __forceinline__ void row_max(const float (&s)[KEY_TILES][4], float (&maximum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    maximum[half] = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int n = 1; n < KEY_TILES; ++n) maximum[half] = fmaxf(maximum[half], fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(ALL_LANES, maximum[half], 1));
    maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(ALL_LANES, maximum[half], 2));
  }
}

// shift = max(shift, max_j s_j · scale + room), O and sums to match.
template <Rescale RESCALE, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void raise_shift(RowState<ROW_TILES, DIM_TILES>& state,
                                            const float (&s)[ROW_TILES][KEY_TILES][4], float scale) {
  constexpr float ROOM = RESCALE == Rescale::LAZY ? LAZY_OCTAVES : 0.f;
  float factor[ROW_TILES][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    float maximum[2];
    row_max(s[m], maximum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old_shift = state.shift[m][half], scaled = maximum[half] * scale;
      state.shift[m][half] =
          RESCALE == Rescale::LAZY ? (scaled > old_shift ? scaled + ROOM : old_shift) : fmaxf(scaled, old_shift);
      factor[m][half] = exp2_approx(old_shift - state.shift[m][half]);
      grew |= scaled > old_shift;
    }
  }
  if (RESCALE == Rescale::ALWAYS || __any_sync(ALL_LANES, grew)) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) state.rescale(m, factor[m][0], factor[m][1]);
  }
}

// s = s · scale - shift, the exponent of P. `raise` = the shifts may be below the maxima: the first tile, and tiles
// with masked scores. LAZY trusts them otherwise, and if a score reaches its shift after all (one sign bit per score
// tells), lifts the shift of that row.
template <Rescale RESCALE, int ROW_TILES, int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void shift_scores(RowState<ROW_TILES, DIM_TILES>& state, float (&s)[ROW_TILES][KEY_TILES][4],
                                             float scale, bool raise) {
  if (RESCALE != Rescale::LAZY || raise) raise_shift<RESCALE>(state, s, scale);
  int all_negative = -1;
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = fmaf(s[m][n][e], scale, -state.shift[m][e / 2]);
        if (RESCALE == Rescale::LAZY) all_negative &= __float_as_int(s[m][n][e]);
      }
  if (RESCALE == Rescale::LAZY && __any_sync(ALL_LANES, all_negative >= 0)) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      float rise[2];
      row_max(s[m], rise);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rise[half] = rise[half] >= 0.f ? rise[half] + LAZY_OCTAVES : 0.f;
        state.shift[m][half] += rise[half];
      }
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] -= rise[e / 2];
      state.rescale(m, exp2_approx(-rise[0]), exp2_approx(-rise[1]));
    }
  }
}
