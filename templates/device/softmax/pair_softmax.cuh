// pair_softmax.cuh: the online softmax on wgmma's accumulators in fp16, pairs of neighbouring keys: register i of a
// lane is row g + 8 (i % 2), keys i / 2 * 8 + lane % 4 * 2 and the next (PTX ISA, wgmma m64nNk32, D of fp16). For
// scores and probabilities that are rounded to 8 bits before and afterwards: fp16 keeps 11.
#include "device/ptx/byte_permute.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/max_nan.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/pairs.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"
#include "device/softmax/wgmma_softmax.cuh"

template <bool A, class First, class Second> __device__ __forceinline__ auto& one_of(First& first, Second& second) {
  if constexpr (A) return first;
  else return second;
}

// Maxima of rows g and g + 8 of a tile. As integers, of which one instruction compares three pairs, where none of a
// lane is negative: halves from 0 on, infinity and NaN have the order of their bits.
template <int WORDS> __device__ __forceinline__ void max_of_pairs(const uint32_t (&pairs)[WORDS], float (&maximum)[2]) {
  static_assert(WORDS % 4 == 0, "two pairs of a row");
  uint32_t most[2], both;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    most[row] = larger_bits(pairs[row], pairs[2 + row]);
#pragma unroll
    for (int i = 4 + row; i < WORDS; i += 4) most[row] = larger_bits(larger_bits(most[row], pairs[i]), pairs[i + 2]);
  }
  // The two rows side by side: the four lanes of a row hold different keys.
  both = larger_bits(byte_permute(most[0], most[1], LOW_HALVES), byte_permute(most[0], most[1], HIGH_HALVES));
  if (__any_sync(ALL_LANES, (both & 0x80008000u) != 0)) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) most[i % 2] = i < 2 ? pairs[i] : larger_halves(most[i % 2], pairs[i]);
    both = larger_halves(byte_permute(most[0], most[1], LOW_HALVES), byte_permute(most[0], most[1], HIGH_HALVES));
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) both = larger_halves(both, __shfl_xor_sync(ALL_LANES, both, lanes));
  unpack2(both, Fp16{}, maximum[0], maximum[1]);
}

// 2^x of both by straight lines between whole x, rounded to the three bits of mantissa that e4m3 has, so that weights
// are summed as they are multiplied; 0 below 2^-15, beyond what e4m3 has. Of whole x it is exact, else up to 6 % too
// large, of which some 3 % are taken off by 3/8. `eight_x` is 8 x and EIGHT_AT_1 more, from 0 on: with 1024 its last
// digits are those of the number, moved by seven.
constexpr float EIGHT_AT_1 = 8 * 15 - 3.f / 8;
__device__ __forceinline__ uint32_t exp2_of_eighths(uint32_t eight_x) {
  constexpr uint32_t FROM = 0x64006400;  // 1024
  return (add_pairs(eight_x, FROM) << 7) - (FROM << 7);
}
__device__ __forceinline__ uint32_t exp2_by_lines(uint32_t x) {
  constexpr uint32_t EIGHT = 0x48004800, START = 0x577a577a;  // 8; EIGHT_AT_1
  return exp2_of_eighths(multiply_add_from_0(x, EIGHT, START));
}

// `softmax_tile` of Rescale::ALWAYS, in place of scores. A shift is what fp16 has, so that the weight of a row's
// greatest score is a power of two but for the rounding of its exponent. MASKED: a score may be minus infinity, and a
// row may have seen no key. With all EIGHTHS an exponent is multiplied by 8 as a
// score is by its scale.
template <int EIGHTHS, bool MASKED, class Range, int WORDS>
__device__ __forceinline__ void softmax_of_pairs(RowState& state, uint32_t (&pairs)[WORDS], float scale,
                                                 float (&factor)[2]) {
  constexpr bool ALL = EIGHTHS == 8;
  constexpr float UNIT = ALL ? 8.f : 1.f, FROM = ALL ? EIGHT_AT_1 : 0.f;  // an exponent x is FROM + UNIT x
  // fp16 has six digits behind the point up to FAR. The weight of a row's only key has to be a power of two, or it were
  // summed as it is and multiplied as it is rounded: by lines it is one, else where shifts are subtracted from scores.
  constexpr float FAR = MASKED && !ALL ? 0.f : 32.f, MOST = 65504.f;
  constexpr float LEAST = 0x1p-24f;  // of fp16: 0 times a hidden score were NaN
  float maximum[2], shift[2], given[2], ignored;
  max_of_pairs(pairs, maximum);
  if constexpr (MASKED) scale = max_nan(scale, LEAST);
  const bool beyond = UNIT * scale > MOST;  // what fp16 has: multiplied in twice; not of NaN, which stays
  const uint32_t scales = pack2<Fp16>(beyond ? MOST : UNIT * scale, beyond ? MOST : UNIT * scale);
  if (!beyond) {
    unpack2(scales, Fp16{}, scale, ignored);
    scale *= 1.f / UNIT;
  }
  bool lacks[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    shift[row] = greater<true>(fmaf(maximum[row], scale, -float(Range::TOP)), state.shift[row]);
    lacks[row] = MASKED && shift[row] == NO_KEYS;
    if (lacks[row]) shift[row] = 0.f;
  }
  float from[2] = {-shift[0], -shift[1]};  // what is added to scores, in octaves
  const bool subtracts = __any_sync(ALL_LANES, beyond || !(fabsf(shift[0]) < FAR && fabsf(shift[1]) < FAR));
  if (subtracts) {  // from scores their greatest, where a shift has too few digits; the rest may be far below others
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const bool hidden = MASKED && maximum[row] == NEGATIVE_INFINITY;
      given[row] = hidden ? 0.f : -maximum[row];
      from[row] = hidden ? 0.f : fmaf(maximum[row], scale, -float(Range::TOP)) - shift[row] + float(Range::TOP);
    }
    const float more = fminf(fmaxf(UNIT * scale * (1.f / MOST), 1.f), MOST);  // of the scale than fp16 has
    const uint32_t less = pack2<Fp16>(given[0], given[1]), rest = pack2<Fp16>(more, more);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      pairs[i] = add_pairs(pairs[i], byte_permute(less, less, i % 2 ? 0x3232 : 0x1010));
      pairs[i] = multiply_add(pairs[i], rest, 0);
    }
  }
  const uint32_t added = pack2<Fp16>(fmaxf(fmaf(from[0], UNIT, FROM), -MOST), fmaxf(fmaf(from[1], UNIT, FROM), -MOST));
  if (!subtracts) {  // shifts are rounded to what is added, but for those that fp16 has not
    unpack2(added, Fp16{}, given[0], given[1]);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      if (fabsf(given[row]) < MOST) shift[row] = (FROM - given[row]) * (1.f / UNIT);
  }
  const uint32_t of_row[2] = {byte_permute(added, added, 0x1010), byte_permute(added, added, 0x3232)};
  uint32_t sums[2][2] = {}, order = LOW_HALVES;
  forget_origin(order);
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if constexpr (ALL) {
      pairs[i] = exp2_of_eighths(multiply_add_from_0(pairs[i], scales, of_row[i % 2]));
    } else {
      const uint32_t x = multiply_add(pairs[i], scales, of_row[i % 2]);
      pairs[i] = on_fma_units<EIGHTHS>(i / 2) ? exp2_by_lines(x) : exp2_of_pair(x, order);
    }
    sums[i % 2][i / 2 % 2] = add_pairs(sums[i % 2][i / 2 % 2], pairs[i]);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float low, high;
    unpack2(add_pairs(sums[row][0], sums[row][1]), Fp16{}, low, high);
    if (lacks[row]) shift[row] = NO_KEYS;
    factor[row] = exp2_approx(state.shift[row] - shift[row]);
    state.shift[row] = shift[row];
    state.sum[row] = fmaf(state.sum[row], factor[row], low + high);
  }
}
