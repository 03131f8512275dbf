// wgmma_scores.cuh: what a mask and a variant make of scores on wgmma's accumulators, in the fragment order of
// wgmma_softmax.cuh.
#include "device/mask.cuh"
#include "device/ptx/element.cuh"

// s = -inf for keys that a row does not see. `visible`: of all keys, row g being the first row; `first_key` is the
// tile's.
template <int FLOATS, class Keys>
__device__ __forceinline__ void mask_scores(float (&s)[FLOATS], int first_key, const Keys& visible, int lane) {
  const int lane_key = first_key + lane % 4 * 2;  // the lane's first
  const int low_keys = visible.of(0) - lane_key, high_keys = visible.of(8) - lane_key;
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) {
    if (i / 4 * 8 + i % 2 >= (i & 2 ? high_keys : low_keys)) s[i] = NEGATIVE_INFINITY;
  }
  if constexpr (Keys::WINDOW) {
    const int low_hidden = visible.hidden_of(0) - lane_key, high_hidden = visible.hidden_of(8) - lane_key;
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) {
      if (i / 4 * 8 + i % 2 < (i & 2 ? high_hidden : low_hidden)) s[i] = NEGATIVE_INFINITY;
    }
  }
}

// The same of pairs in fp16, in the order of pair_softmax.cuh.
template <int WORDS, class Keys>
__device__ __forceinline__ void mask_scores(uint32_t (&pairs)[WORDS], int first_key, const Keys& visible, int lane) {
  constexpr uint32_t BOTH = 0xfc00fc00, LOW = 0x0000fc00, HIGH = 0xfc000000;  // minus infinity
  const int lane_key = first_key + lane % 4 * 2;
  const int keys[2] = {visible.of(0) - lane_key, visible.of(8) - lane_key};
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const int first = i / 2 * 8;
    if (first + 1 >= keys[i % 2]) pairs[i] = first >= keys[i % 2] ? BOTH : (pairs[i] & 0xffffu) | HIGH;
  }
  if constexpr (Keys::WINDOW) {
    const int hidden[2] = {visible.hidden_of(0) - lane_key, visible.hidden_of(8) - lane_key};
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int first = i / 2 * 8;
      if (first < hidden[i % 2]) pairs[i] = first + 1 < hidden[i % 2] ? BOTH : (pairs[i] & 0xffff0000u) | LOW;
    }
  }
}

// As `Keys`, of rows g and g + 8 that are not 8 queries apart.
template <class Keys> struct KeysOfTwo {
  static constexpr bool WINDOW = Keys::WINDOW;
  Keys low, high;
  __device__ __forceinline__ int of(int row) const { return (row ? high : low).of(0); }
  __device__ __forceinline__ int hidden_of(int row) const { return (row ? high : low).hidden_of(0); }
};
template <class Keys> KeysOfTwo(Keys, Keys) -> KeysOfTwo<Keys>;

// The bias of the scores of rows g and g + 8, from this lane's first key on.
template <int PAIRS, class Terms, class Pair, class Row>
__device__ __forceinline__ void load_bias(Pair (&bias)[PAIRS], const Terms& terms, const Row& low, const Row& high) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) bias[i] = terms.bias_of_pair(i % 2 ? high : low, i / 2 * 8);
}
// What `terms` make of these scores, their bias loaded.
template <int FLOATS, int PAIRS, class Terms, class Pair, class Row>
__device__ __forceinline__ void change_tile(float (&s)[FLOATS], const Pair (&bias)[PAIRS], const Terms& terms,
                                            const Row& low, const Row& high) {
#pragma unroll
  for (int i = 0; i < FLOATS; i += 2)
    terms.of_pair(s[i], s[i + 1], i & 2 ? high : low, i / 4 * 8, bias[PAIRS > 1 ? i / 2 : 0]);
}
