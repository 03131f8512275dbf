// reduce_scatter.cuh: sums over LANES neighbouring lanes of N values each, a power of two, that end up spread over the
// lanes. A butterfly that halves the values at each step takes N - 1 shuffles (and one for each step past N); a full
// reduction of each takes N log2(LANES). On return a lane's x[i] is the sum of value lane · N / LANES + i, lane counted
// in its group; with N < LANES, x[0] is that of value lane · N / LANES.
template <int LANES, int N, int FLOATS> __device__ __forceinline__ void reduce_scatter(float (&x)[FLOATS], int lane) {
  static_assert((N & (N - 1)) == 0 && (LANES & (LANES - 1)) == 0 && N <= FLOATS, "halves of halves");
  if constexpr (LANES > 1) {
    constexpr int DISTANCE = LANES / 2, LEFT = N > 1 ? N / 2 : 1;
    if constexpr (N > 1) {
      const bool upper = lane & DISTANCE;
#pragma unroll
      for (int i = 0; i < LEFT; i++) {
        const float kept = upper ? x[i + LEFT] : x[i], given = upper ? x[i] : x[i + LEFT];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, given, DISTANCE);
      }
    } else {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], DISTANCE);
    }
    reduce_scatter<DISTANCE, LEFT>(x, lane);
  }
}
