// score_gradient.cuh: what variants of attention do to a score, and by how much a change of the product changes it.
#include "device/ptx/element.cuh"
#include "device/ptx/tanh.cuh"
#include "device/score.cuh"

// BIAS_GIVEN: whoever asks has the bias; else it is read from global memory.
template <typename Element, bool SOFTCAP, bool ALIBI, bool BIAS, class Own, bool BIAS_GIVEN = false>
struct ScoreGradient {
  static constexpr bool OF_RESULT = SOFTCAP && !ALIBI && !BIAS && !Own::GIVEN;  // the changed score says the factor
  static constexpr bool FACTORED = SOFTCAP || Own::GIVEN;                       // the factor is not 1
  static constexpr bool MAY_BE_NONE = Own::GIVEN;  // where a score is hidden the factor may be no number
  float score_scale, term_unit, slope;             // see VariantArguments; the slope times term_unit
  const Element* bias_gmem;                        // of the head: [queries, keys]
  int64_t bias_row_stride;
  int diagonal, seqlen_q, seqlen_k;
  Own own;
  int batch, head;  // of an expression

  template <class Terms>
  __device__ __forceinline__ ScoreGradient(const Terms& terms, int batch, int head, int seqlen_q, int seqlen_k)
      : seqlen_q(seqlen_q), seqlen_k(seqlen_k), own(terms.own) {
    if constexpr (SOFTCAP) score_scale = terms.given.score_scale;
    if constexpr (BIAS || Own::GIVEN) term_unit = terms.given.term_unit;
    if constexpr (ALIBI) slope = terms.given.slopes[head] * terms.given.term_unit, diagonal = terms.given.diagonal;
    if constexpr (Own::GIVEN) this->batch = batch, this->head = head, diagonal = terms.given.diagonal;
    if constexpr (BIAS) {
      bias_gmem = terms.given.bias + batch * terms.given.bias_batch_stride + head * terms.given.bias_head_stride;
      bias_row_stride = terms.given.bias_row_stride;
    }
  }
  // OF_RESULT; 0 of a score that is hidden since.
  static __device__ __forceinline__ float factor_of(float changed) { return 1.f - fminf(changed * changed, 1.f); }
  // The score before the kernel scales it, and what an expression makes it of. Returns the factor of its gradient.
  __device__ __forceinline__ float change(float& score, float& before, int query, int key, float bias = 0.f) const {
    float factor = 1.f;
    if constexpr (SOFTCAP) {
      score = tanh_approx(score * score_scale);
      factor = fmaf(-score, score, 1.f);
    }
    if constexpr (ALIBI) score = fmaf(-slope, fabsf(float(key - query - diagonal)), score);
    if constexpr (BIAS && BIAS_GIVEN) {
      score = fmaf(bias, term_unit, score);
    } else if constexpr (BIAS) {
      if (query < seqlen_q && key < seqlen_k)
        score = fmaf(to_float(bias_gmem[query * bias_row_stride + key]), term_unit, score);
    }
    if constexpr (Own::GIVEN) {
      before = score * own.unit;
      factor *= own.slope(before, batch, head, query, key, diagonal);
      score = own.of(before, batch, head, query, key, diagonal) * term_unit;
      if (query >= seqlen_q) score = NEGATIVE_INFINITY;  // no row: whatever the expression makes of it
    }
    return factor;
  }
  __device__ __forceinline__ float change(float& score, int query, int key, float bias = 0.f) const {
    float before;
    return change(score, before, query, key, bias);
  }
};
