// log_sum.cuh: a row's log-sum-exp of its shift and sum: log Σ_j e^(score_j) = (shift + log2 Σ_j 2^(s_j - shift)) ·
// ln 2.
#include "device/ptx/element.cuh"

// -inf for no key, whose shift is finite.
__device__ __forceinline__ float log_sum(float shift, float sum) {
  constexpr float LN_2 = 0.693147180559945309f;
  return (shift + __log2f(sum)) * LN_2;
}
