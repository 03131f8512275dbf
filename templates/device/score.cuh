// score.cuh: what variants of attention do to a score between the product and the softmax, and what a sink adds to a
// sum of exponentials. All that the kernels know of it stands here; only their fragments are their own.
#include "device/ptx/element.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/tanh.cuh"
#include "device/mask.cuh"

template <typename Element> struct VariantArguments {
  Window window;
  int diagonal;          // ALIBI: the key from which query 0 counts
  float score_scale;     // SOFTCAP: the softmax scale / cap, and the kernel's scale is the cap
  float term_unit;       // what an added 1 is before the kernel scales a score
  const Element* sinks;  // [heads]
  const float* slopes;   // [heads]
  const Element* bias;   // rows of whole 16 bytes over the keys
  int64_t bias_batch_stride, bias_head_stride, bias_row_stride;  // elements; 0 where it is the same for all
  const int* seqused;                                            // [batch]: keys in use
  const int* table;                                              // [batch, table_pages]: pages of K and V
  int page_bits, table_pages;                                    // a page has 2^page_bits keys
  int kv_rows;                                                   // from a batch, or a page, of K and V to the next
  const int *query_starts, *key_starts;                          // [sequences + 1]: where packed ones begin
  int total_queries, sequences;                                  // of all of them; their number
};

// What the rows of a head have in common.
template <typename Element> struct HeadTerms {
  float slope = 0.f;                   // ALIBI: times term_unit
  const Element* bias_gmem = nullptr;  // BIAS: [seqlen_q, seqlen_k]
  int batch = 0, head = 0;             // of an expression
};

// A row's terms of the keys from some key on.
template <typename Element> struct RowTerms {
  float slope, distance;        // ALIBI: of the first key from the row's diagonal
  const Element* bias_gmem;     // BIAS: of the first key
  int keys;                     // that there are from the first on
  int batch, head, query, key;  // of an expression; the first key
};

// What an expression of scores is made of beside C++'s own (evoattn/model/score.py).
__device__ __forceinline__ int inside(int index, int size) { return max(0, min(index, size - 1)); }
__device__ __forceinline__ int wrapped(int index, int size) { return inside(index < 0 ? index + size : index, size); }
__device__ __forceinline__ int to_int(long long x) {
  return int(x > 0x7fffffffLL ? 0x7fffffffLL : x < -0x80000000LL ? -0x80000000LL : x);
}
__device__ __forceinline__ int floor_divide(int x, int y) { return x / y - (x % y != 0 && (x < 0) != (y < 0)); }
__device__ __forceinline__ int floor_remainder(int x, int y) { return x - floor_divide(x, y) * y; }
// sin(x + half_turns · pi), by its series of degree 11 from the nearest whole number of half turns: 2e-7 off.
__device__ __forceinline__ float sine(float x, float half_turns) {
  const float nearest = rintf(fmaf(x, 0.318309886f, half_turns)), turns = half_turns - nearest;
  const float rest = fmaf(turns, -8.74227766e-8f, fmaf(turns, 3.14159274f, x)), square = rest * rest;
  float factor = fmaf(square, -2.50521084e-8f, 2.75573192e-6f);
  factor = fmaf(square, fmaf(square, factor, -1.98412698e-4f), 8.33333333e-3f);
  const float value = fmaf(square * rest, fmaf(square, factor, -1.66666667e-1f), rest);
  return int(nearest) % 2 == 0 ? value : -value;
}
template <typename Number> __device__ __forceinline__ Number larger(Number x, Number y) { return x > y ? x : y; }
template <typename Number> __device__ __forceinline__ Number smaller(Number x, Number y) { return x < y ? x : y; }
template <typename Number> __device__ __forceinline__ Number magnitude(Number x) { return x < 0 ? -x : x; }

// Two neighbours of a row of the bias, the first at an even place, as they are kept in registers.
template <typename Element> struct BiasPair {
  uint32_t word = 0;
  __device__ __forceinline__ void load(const Element* pair_gmem) {
    word = *reinterpret_cast<const uint32_t*>(pair_gmem);
  }
  __device__ __forceinline__ float low() const { return to_float(Element{uint16_t(word)}); }
  __device__ __forceinline__ float high() const { return to_float(Element{uint16_t(word >> 16)}); }
};
template <> struct BiasPair<Fp32> {
  float2 pair = {0.f, 0.f};
  __device__ __forceinline__ void load(const Fp32* pair_gmem) { pair = *reinterpret_cast<const float2*>(pair_gmem); }
  __device__ __forceinline__ float low() const { return pair.x; }
  __device__ __forceinline__ float high() const { return pair.y; }
};

// Own: an expression of the caller's (`OWN_SCORE`).
template <typename Element, bool WINDOWED, bool SOFTCAP, bool ALIBI, bool BIAS, bool SINKS, class Own>
struct ScoreTerms {
  static constexpr bool WINDOW = WINDOWED;                    // beside the scores, as `KeyMask` has it
  static constexpr bool ADDED = ALIBI || BIAS || Own::GIVEN;  // rows and keys differ in how scores change
  static constexpr bool CAPPED = SOFTCAP;
  static constexpr bool ANY = SOFTCAP || ADDED;            // scores change
  static constexpr bool BIASED = BIAS;                     // with a tensor to load
  static constexpr bool MAY_HIDE = BIAS || Own::MAY_HIDE;  // a score may become -inf, whatever the mask says
  static constexpr bool SINK = SINKS;
  VariantArguments<Element> given;
  Own own;

  // Keys of a batch that are in use, none for a number below 0. AT_END: the diagonal ends at the last of them, and
  // slopes count from there.
  template <bool AT_END> __device__ __forceinline__ int keys_in_use(int batch, int seqlen_k, int more = 0) {
    const int used = max(0, min(seqlen_k, given.seqused[batch] + more));
    if constexpr (AT_END) given.diagonal += used - seqlen_k;
    return used;
  }

  __device__ __forceinline__ HeadTerms<Element> head(int batch, int head) const {
    HeadTerms<Element> terms;
    if constexpr (ALIBI) terms.slope = given.slopes[head] * given.term_unit;
    if constexpr (BIAS) terms.bias_gmem = given.bias + batch * given.bias_batch_stride + head * given.bias_head_stride;
    if constexpr (Own::GIVEN) terms.batch = batch, terms.head = head;
    return terms;
  }
  __device__ __forceinline__ RowTerms<Element> row(const HeadTerms<Element>& head, int query, int key, int seqlen_q,
                                                   int seqlen_k) const {
    RowTerms<Element> row{head.slope, 0.f, nullptr, seqlen_k - key, head.batch, head.head, query, key};
    if constexpr (ALIBI) row.distance = float(key - query - given.diagonal);
    if constexpr (BIAS) {  // rows past the last are the last one: they can be read and are never stored
      row.bias_gmem = head.bias_gmem + min(query, seqlen_q - 1) * given.bias_row_stride + key;
    }
    return row;
  }

  // A score `step` keys behind the row's first key, before the kernel scales it; of a key past the last one anything.
  __device__ __forceinline__ float of(float score, const RowTerms<Element>& row, int step) const {
    score = capped(score);
    if constexpr (ALIBI) score = sloped(score, row, step);
    if constexpr (BIAS) {
      if (step < row.keys) score = fmaf(to_float(row.bias_gmem[step]), given.term_unit, score);
    }
    return expressed(score, row, step);
  }
  // The bias of two neighbours, 0 past the last key: to be loaded before the scores are there. The key of the first is
  // even, and so are the lengths of the bias's rows.
  __device__ __forceinline__ BiasPair<Element> bias_of_pair(const RowTerms<Element>& row, int step) const {
    BiasPair<Element> pair;
    if (step < row.keys) pair.load(row.bias_gmem + step);
    return pair;
  }
  // As `of`, of two neighbours whose bias was loaded.
  __device__ __forceinline__ void of_pair(float& low, float& high, const RowTerms<Element>& row, int step,
                                          const BiasPair<Element>& bias) const {
    low = capped(low), high = capped(high);
    if constexpr (ALIBI) low = sloped(low, row, step), high = sloped(high, row, step + 1);
    if constexpr (BIAS) {
      low = fmaf(bias.low(), given.term_unit, low), high = fmaf(bias.high(), given.term_unit, high);
    }
    low = expressed(low, row, step), high = expressed(high, row, step + 1);
  }
  // The same, with the load.
  __device__ __forceinline__ void of_pair(float& low, float& high, const RowTerms<Element>& row, int step) const {
    if constexpr (BIAS) of_pair(low, high, row, step, bias_of_pair(row, step));
    else of_pair(low, high, row, step, BiasPair<Element>{});
  }

  // Whether a key is seen in a PARTIAL block of a list, by its predicate.
  __device__ __forceinline__ bool shows(int batch, int head, int query, int key) const {
    return own.shows(batch, head, query, key, given.diagonal);
  }

  // Of a row's softmax, (shift, sum) = (shift, Σ_j 2^(s_j - shift)) with the sink of the head as one more score.
  // Returns the factor by which O must follow the shift.
  __device__ __forceinline__ float add_sink(float& shift, float& sum, int head) const {
    if constexpr (!SINKS) return 1.f;
    constexpr float LOG2_E = 1.44269504088896341f;
    const float sink = to_float(given.sinks[head]) * LOG2_E, higher = fmaxf(shift, sink),
                factor = exp2_approx(shift - higher);
    sum = fmaf(sum, factor, exp2_approx(sink - higher)), shift = higher;
    return factor;
  }

private:
  __device__ __forceinline__ float capped(float score) const {
    if constexpr (!SOFTCAP) return score;
    else if constexpr (sizeof(Element) == 4) return tanhf(score * given.score_scale);  // approx is for 16 bits
    else return tanh_approx(score * given.score_scale);
  }
  __device__ __forceinline__ float expressed(float score, const RowTerms<Element>& row, int step) const {
    if constexpr (!Own::GIVEN) return score;
    else return own.changed(score, given.term_unit, row.batch, row.head, row.query, row.key, step, given.diagonal);
  }
  __device__ __forceinline__ float sloped(float score, const RowTerms<Element>& row, int step) const {
    return fmaf(-row.slope, fabsf(row.distance + float(step)), score);
  }
};
