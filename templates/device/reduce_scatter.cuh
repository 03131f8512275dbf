// reduce_scatter.cuh: sums over LANES neighbouring lanes of N values each, a power of two, that end up spread over the lanes. A butterfly
// that halves the values at each step takes N - 1 shuffles (and one for each step past N); a full reduction of each takes N log2(LANES).
// On return a lane's x[i] is the sum of value lane · N / LANES + i, lane counted in its group; with N < LANES, x[0] is that of value
// lane · N / LANES.
template <int LANES, int N> __device__ __forceinline__ void reduce_scatter(float (&x)[N], int lane) {
  static_assert((N & (N - 1)) == 0 && (LANES & (LANES - 1)) == 0, "halves of halves");
  int count = N;
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = lane & distance;
#pragma unroll
      for (int i = 0; i < count; i++) {
        const float kept = upper ? x[i + count] : x[i], given = upper ? x[i] : x[i + count];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
      }
    } else {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], distance);
    }
  }
}
