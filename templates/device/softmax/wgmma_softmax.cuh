// wgmma_softmax.cuh: the online softmax on wgmma's accumulators. With g = lane / 4, s[i] of a lane is row g + 8 (i / 2
// % 2) of its warp's 16 rows, key i / 4 * 8 + lane % 4 * 2 + i % 2 of the tile (PTX ISA, wgmma m64nNk16, D).
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/max_nan.cuh"
#include "device/ptx/warp.cuh"
#include "device/softmax/log_sum.cuh"
#include "device/softmax/exp2_polynomial.cuh"

template <bool VALUE> struct Flag {
  static constexpr bool value = VALUE;
};
using True = Flag<true>;
using False = Flag<false>;

enum class Rescale {
  ALWAYS,      // shift = row maximum; O and sums are rescaled after every tile
  LAZY,        // shift = LAZY_OCTAVES above the first maximum; O and sums are rescaled only if a score reaches it
  LAZY_AFTER,  // shift = the first maximum; only if the sum of a tile is too high are its scores multiplied again and
               // treated as ALWAYS
  LAZY_ROWS,   // as LAZY_AFTER, but only the rows whose sum it is are raised, by the same operations in masked tiles
};
constexpr __device__ __forceinline__ bool looks_back(Rescale rescale) {
  return rescale == Rescale::LAZY_AFTER || rescale == Rescale::LAZY_ROWS;
}

constexpr float NO_KEYS = -1e38f;  // the shift of no key: finite, so that a masked score minus it is -inf and no NaN
// What probabilities may be in the element type of the product that takes them: 2^TOP at a row's maximum, and at most
// HIGHEST. bf16 and fp32 hold more than fp16.
struct WholeRange {
  static constexpr int TOP = 0;
  static constexpr float HIGHEST = 32768.f;
  static constexpr bool MAX_OF_BITS = false;  // maxima of a tile are of integers, where that is right
  static constexpr bool LACKS_ROWS = false;   // rows g + 8 are none of any answer, and their probabilities 0
};

// Of a lane's numbers.
template <class Range> constexpr __device__ __forceinline__ bool lacks(int i) {
  return Range::LACKS_ROWS && i / 2 % 2 == 1;
}

// Rows g and g + 8 of a lane.
struct RowState {
  float shift[2];  // log2 units: the row maximum so far, or above it
  float sum[2];    // Σ_j 2^(s_j - shift) of this lane's keys

  __device__ __forceinline__ void clear() {
    shift[0] = shift[1] = NO_KEYS;
    sum[0] = sum[1] = 0.f;
  }
};

// Where some exponentials are polynomials, which are numbers whatever their exponents are, KEEP_NAN has the shift of a
// row hold NaN as soon as a score is NaN or infinite: all of its exponents, and its answer, are NaN then.
template <bool KEEP_NAN> __device__ __forceinline__ float greater(float a, float b) {
  if constexpr (KEEP_NAN) return max_nan(a, b);
  return fmaxf(a, b);
}
template <bool KEEP_NAN> __device__ __forceinline__ bool exceeds(float a, float b) {
  if constexpr (KEEP_NAN) return !(a <= b);
  return a > b;
}
template <bool KEEP_NAN> __device__ __forceinline__ float finite_or_nan(float x) {
  if constexpr (KEEP_NAN) return fmaf(x, 0.f, x);
  return x;
}

// EIGHTHS of every eight exponentials.
template <int EIGHTHS> constexpr __device__ __forceinline__ bool on_fma_units(int i) {
  return i * EIGHTHS % 8 + EIGHTHS > 7;
}

// By how much a shift rises if the greatest score is so far above it.
template <int LAZY_OCTAVES, bool KEEP_NAN, class Range> __device__ __forceinline__ float rise_of(float above) {
  const bool reached = KEEP_NAN ? !(above < 0.f) : above >= 0.f;
  return finite_or_nan<KEEP_NAN>(reached ? above + (LAZY_OCTAVES - Range::TOP) : 0.f);
}

// Those of a lane's keys as integers, of which one instruction compares three; false where one is negative, and so not
// what it stands for: floats from 0 on, infinity and NaN have the order of their bits.
template <int FLOATS> __device__ __forceinline__ bool lane_max_of_bits(const float (&s)[FLOATS], float (&maximum)[2]) {
  int most[2][2];
#pragma unroll
  for (int i = 0; i < FLOATS; i += 4)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int& of = most[row][i / 4 % 2];
      const int low = __float_as_int(s[i + 2 * row]), high = __float_as_int(s[i + 2 * row + 1]);
      of = i < 8 ? max(low, high) : max(max(of, low), high);
    }
  const int greatest[2] = {max(most[0][0], most[0][1]), max(most[1][0], most[1][1])};
  maximum[0] = __int_as_float(greatest[0]), maximum[1] = __int_as_float(greatest[1]);
  return !__any_sync(ALL_LANES, (greatest[0] | greatest[1]) < 0);
}

// Maxima of rows g and g + 8: the four lanes of a row hold different keys. Two chains per row hide the latency.
template <bool KEEP_NAN, bool OF_BITS, int FLOATS>
__device__ __forceinline__ void row_max(const float (&s)[FLOATS], float (&maximum)[2]) {
  if constexpr (OF_BITS) {
    if (lane_max_of_bits(s, maximum)) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float& both = maximum[row];
        both = greater<KEEP_NAN>(both, __shfl_xor_sync(ALL_LANES, both, 1));
        both = greater<KEEP_NAN>(both, __shfl_xor_sync(ALL_LANES, both, 2));
      }
      return;
    }
  }
  float other[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    maximum[row] = greater<KEEP_NAN>(s[2 * row], s[2 * row + 1]);
    other[row] = greater<KEEP_NAN>(s[4 + 2 * row], s[5 + 2 * row]);
  }
#pragma unroll
  for (int i = 8; i < FLOATS; i += 8)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float *low = s + i + 2 * row, *high = low + 4;
      maximum[row] = greater<KEEP_NAN>(maximum[row], greater<KEEP_NAN>(low[0], low[1]));
      other[row] = greater<KEEP_NAN>(other[row], greater<KEEP_NAN>(high[0], high[1]));
    }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float& both = maximum[row];
    both = greater<KEEP_NAN>(both, other[row]);
    both = greater<KEEP_NAN>(both, __shfl_xor_sync(ALL_LANES, both, 1));
    both = greater<KEEP_NAN>(both, __shfl_xor_sync(ALL_LANES, both, 2));
  }
}

// LAZY_ROWS: raises those of a lane's rows to their greatest score whose probabilities are too high, by sums of a tile
// of their four lanes, which are made where one may be. Returns whether one was.
template <class Range, int FLOATS>
__device__ __forceinline__ bool raise_high_rows(RowState& state, const float (&s)[FLOATS], const float (&maximum)[2],
                                                float scale, float (&factor)[2]) {
  constexpr float SAFE = Range::HIGHEST / FLOATS;  // a lane has half as many numbers of a row
  bool may_be = false, raised = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) may_be |= !(exp2_approx(fmaf(maximum[row], scale, -state.shift[row])) <= SAFE);
  if (__any_sync(ALL_LANES, may_be)) {
    float sum[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < FLOATS; ++i)
      (i % 2 ? odd : sum)[i / 2 % 2] += exp2_approx(fmaf(s[i], scale, -state.shift[i / 2 % 2]));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned high_lanes = __ballot_sync(ALL_LANES, !(sum[row] + odd[row] <= Range::HIGHEST));
      if (!(high_lanes >> threadIdx.x % 32 / 4 * 4 & 0xf)) continue;
      const float shift = fmaxf(__fmul_rn(maximum[row], scale), state.shift[row]);
      const float change = exp2_approx(state.shift[row] - shift);
      factor[row] *= change, state.sum[row] = __fmul_rn(state.sum[row], change), state.shift[row] = shift;
      raised = true;
    }
  }
  return raised;
}

// s = s · scale - shift, with shift and sums of the rows raised so that it is at most 0; if `looks_back` by
// `softmax_tile`, unless FIRST or MASKED. Returns whether O must be multiplied by `factor`, the same for all lanes of
// the warp. FIRST: the first tile, O is still 0. MASKED: some row may see none or the first of its keys in this tile.
//
// But for LAZY_AFTER what becomes of a row is the same whether its tile is FIRST, MASKED or neither, which depends on
// other rows: a row that has seen no key takes the first maximum, every other one is raised by the same operations in
// the same order. Products are not to be fused with the sum behind them, as the compiler may in one case and not in
// another: `__fmul_rn`.
template <Rescale RESCALE, int LAZY_OCTAVES, bool FIRST, bool MASKED, int EIGHTHS, class Range, int FLOATS>
__device__ __forceinline__ bool shift_scores(RowState& state, float (&s)[FLOATS], float scale, float (&factor)[2]) {
  constexpr bool KEEP_NAN = EIGHTHS > 0;
  constexpr bool LAZY = RESCALE != Rescale::ALWAYS, TESTED = RESCALE == Rescale::LAZY && !FIRST && !MASKED;
  constexpr bool RISES = RESCALE == Rescale::LAZY && !FIRST;  // scores may reach a shift that was set before
  float subtracted[2] = {state.shift[0], state.shift[1]}, rise[2] = {0.f, 0.f};
  bool rescale = false;
  if constexpr (FIRST || MASKED || !LAZY) {  // shift = max(shift, max_j s_j · scale + room)
    float maximum[2];
    row_max<KEEP_NAN, Range::MAX_OF_BITS && !MASKED>(s, maximum);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float old_shift = state.shift[row];
      const float scaled = Range::TOP ? fmaf(maximum[row], scale, -float(Range::TOP)) : __fmul_rn(maximum[row], scale);
      const bool is_set = RESCALE == Rescale::LAZY_ROWS && !FIRST && old_shift > NO_KEYS;
      const bool higher = exceeds<KEEP_NAN>(scaled, old_shift) && !is_set;
      state.shift[row] = !LAZY ? greater<KEEP_NAN>(scaled, old_shift) : higher ? scaled + LAZY_OCTAVES : old_shift;
      state.shift[row] = finite_or_nan<KEEP_NAN>(state.shift[row]);
      subtracted[row] = state.shift[row];
      if (RISES && old_shift > NO_KEYS) {  // as below, of the greatest score
        rise[row] = rise_of<LAZY_OCTAVES, KEEP_NAN, Range>(fmaf(maximum[row], scale, -old_shift));
        subtracted[row] = old_shift, state.shift[row] = old_shift + rise[row];
      }
      if constexpr (!FIRST) {
        factor[row] = exp2_approx(RISES ? -rise[row] : old_shift - state.shift[row]);
        state.sum[row] = __fmul_rn(state.sum[row], factor[row]);
        rescale |= RISES ? rise[row] != 0.f : higher;
      }
    }
    if constexpr (RESCALE == Rescale::LAZY_ROWS && !FIRST) {
      rescale |= raise_high_rows<Range>(state, s, maximum, scale, factor);
      subtracted[0] = state.shift[0], subtracted[1] = state.shift[1];
    }
    if constexpr (!FIRST) rescale = !LAZY || __any_sync(ALL_LANES, rescale);
  }
  int all_negative = -1;
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) {
    s[i] = fmaf(s[i], scale, -subtracted[i / 2 % 2]);
    if constexpr (TESTED) all_negative &= __float_as_int(s[i]);
  }
  if constexpr (TESTED) {  // one sign bit per score tells whether any reached its shift after all
    rescale = __any_sync(ALL_LANES, all_negative >= 0);
    if (rescale) {
      row_max<KEEP_NAN, false>(s, rise);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        rise[row] = rise_of<LAZY_OCTAVES, KEEP_NAN, Range>(rise[row]);
        state.shift[row] += rise[row];
        factor[row] = exp2_approx(-rise[row]);
        state.sum[row] = __fmul_rn(state.sum[row], factor[row]);
      }
    }
  }
  if (RISES && rescale) {
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) s[i] -= rise[i / 2 % 2];
  }
  return rescale;
}

// s = 2^s, sum += Σ s of the lane's rows. EIGHTHS of every eight exponentials run on the FMA units. Two sums per row
// hide the latency.
template <int EIGHTHS, class Range, int FLOATS>
__device__ __forceinline__ void exponentiate(float (&s)[FLOATS], float (&sum)[2]) {
  float odd[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) {
    if (lacks<Range>(i)) continue;
    if (!on_fma_units<EIGHTHS>(i)) s[i] = exp2_approx(s[i]);
    else s[i] = exp2_polynomial(s[i]);
    (i % 2 ? odd : sum)[i / 2 % 2] += s[i];
  }
  sum[0] += odd[0], sum[1] += odd[1];
}

// If it `looks_back`: the sums of a tile show that all its probabilities fit; an infinite one, or NaN, shows the
// contrary.
template <class Range> __device__ __forceinline__ bool too_high(const float (&sum)[2]) {
  return __any_sync(ALL_LANES, !(sum[0] <= Range::HIGHEST && sum[1] <= Range::HIGHEST));
}

// P = softmax numerators of a tile, in place of its scores, and sums += P. As `shift_scores`; `scores_again` is called
// by a warp that lost its scores.
template <Rescale RESCALE, int LAZY_OCTAVES, int EIGHTHS, bool FIRST, bool MASKED, class Range = WholeRange,
          typename ScoresAgain, int FLOATS>
__device__ __forceinline__ bool softmax_tile(RowState& state, float (&s)[FLOATS], float scale, float (&factor)[2],
                                             ScoresAgain scores_again) {
  bool rescale = shift_scores<RESCALE, LAZY_OCTAVES, FIRST, MASKED, EIGHTHS, Range>(state, s, scale, factor);
  if constexpr (!looks_back(RESCALE) || (RESCALE == Rescale::LAZY_AFTER && (FIRST || MASKED))) {
    exponentiate<EIGHTHS, Range>(s, state.sum);
    return rescale;
  }
  float sum[2] = {0.f, 0.f};
  exponentiate<EIGHTHS, Range>(s, sum);
  if constexpr (!FIRST && !MASKED) {
    rescale = too_high<Range>(sum);
    if (rescale) {
      scores_again();
      constexpr bool ROWS = RESCALE == Rescale::LAZY_ROWS;
      shift_scores<ROWS ? RESCALE : Rescale::ALWAYS, 0, false, ROWS, EIGHTHS, Range>(state, s, scale, factor);
      sum[0] = sum[1] = 0.f;
      exponentiate<EIGHTHS, Range>(s, sum);
    }
  }
  state.sum[0] += sum[0], state.sum[1] += sum[1];
  return rescale;
}

// LAZY_ROWS of all keys of the rows, of which those of `s` from LOWER on come first: a row's bits are those of one tile
// after the other. O, which is 0, must be multiplied by `between` once P V of these is there, if one `rises_between`.
template <int LOWER, class Range, int FLOATS>
__device__ __forceinline__ void softmax_of_two(RowState& state, float (&s)[FLOATS], float scale, float (&between)[2],
                                               bool& rises_between) {
  float(&lower)[LOWER] = reinterpret_cast<float(&)[LOWER]>(s[0]);
  float(&upper)[FLOATS - LOWER] = reinterpret_cast<float(&)[FLOATS - LOWER]>(s[LOWER]);
  softmax_tile<Rescale::LAZY_ROWS, 0, 0, true, false, Range>(state, upper, scale, between, [] {});
  const float before[2] = {state.shift[0], state.shift[1]};
  softmax_tile<Rescale::LAZY_ROWS, 0, 0, false, true, Range>(state, lower, scale, between, [] {});
  bool rises = false;  // of a row that sees its first key here O is 0
#pragma unroll
  for (int row = 0; row < 2; ++row) rises |= before[row] > NO_KEYS && state.shift[row] > before[row];
  rises_between = __any_sync(ALL_LANES, rises);
}

// P in the element type, as the A operand of the next product: the accumulators of 16 keys are its registers in order.
// ROWS: of a lane; 1: those of rows g + 8 stay.
template <typename Element, int ROWS = 2, int STEPS>
__device__ __forceinline__ void pack_probabilities(uint32_t (&p)[STEPS][4], const float (&s)[8 * STEPS]) {
#pragma unroll
  for (int i = 0; i < 4 * STEPS; i += 3 - ROWS) p[i / 4][i % 4] = pack2<Element>(s[2 * i], s[2 * i + 1]);
}
// P of no rows g + 8, each in a register of its own: of zeros that are known to be the same, ptxas makes copies before
// each product, and waits for that.
template <int STEPS> __device__ __forceinline__ void lack_probabilities(uint32_t (&p)[STEPS][4], uint32_t zero) {
#pragma unroll
  for (int i = 1; i < 4 * STEPS; i += 2) p[i / 4][i % 4] = __shfl_sync(ALL_LANES, zero, i);
}

template <int FLOATS> __device__ __forceinline__ void scale_rows(float (&o)[FLOATS], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) o[i] *= factor[i / 2 % 2];
}

// Σ over all keys of rows g and g + 8: the four lanes of a row hold different ones.
__device__ __forceinline__ float row_sum(const RowState& state, int row) {
  float sum = state.sum[row];
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  return sum;
}

// Log-sum-exps of rows 0 and 8 from g on: `head(row)`, `lse_gmem(row)`, where it goes, and whether it `exists(row)`.
template <class Terms, typename Head, typename Place, typename Exists>
__device__ __forceinline__ void log_sums_to_global(const RowState& state, const Terms& terms, Head head, Place lse_gmem,
                                                   Exists exists, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float shift = state.shift[i], sum = row_sum(state, i);
    if constexpr (Terms::SINK) terms.add_sink(shift, sum, head(8 * i));
    if (lane % 4 == 0 && exists(8 * i)) *lse_gmem(8 * i) = log_sum(shift, sum);
  }
}

// 1 / Σ of rows g and g + 8, of head(0) and head(8); 0 for a row that saw no key, whose O is 0.
template <class Terms, typename Head>
__device__ __forceinline__ void inverse_sums(const RowState& state, const Terms& terms, Head head,
                                             float (&inverse)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float sum = row_sum(state, row);
    if constexpr (Terms::SINK) {
      float shift = state.shift[row];
      const float factor = terms.add_sink(shift, sum, head(8 * row));
      inverse[row] = sum > 0.f ? __fdividef(factor, sum) : 0.f;
    } else {
      inverse[row] = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
    }
  }
}
