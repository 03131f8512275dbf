// split_merge.cuh: results for different keys of the same query rows added up. A result is, for each row, O before the
// division and a state (shift, sum): O = Σ_j 2^(s_j - shift) V_j, sum = Σ_j 2^(s_j - shift). With shift = max_i
// shift_i, O = Σ_i 2^(shift_i - shift) O_i, and sums alike.
#include "device/ptx/element.cuh"
#include "device/softmax/log_sum.cuh"
#include "device/ptx/exp2.cuh"
#include "device/ptx/warp.cuh"

constexpr float NO_KEY = -1e38f;  // the shift of no key: finite, so that a masked score minus it is -inf and no NaN

struct RowShare {
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);  // four columns of a row
  float shift = NO_KEY, sum = 0.f;

  __device__ __forceinline__ void raise(float other_shift) {
    const float higher = fmaxf(shift, other_shift), factor = exp2_approx(shift - higher);
    o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor, sum *= factor, shift = higher;
  }
  // After `raise` to at least its shift.
  __device__ __forceinline__ void add(const float4& other, const float2& state) {
    const float factor = exp2_approx(state.x - shift);
    o.x = fmaf(other.x, factor, o.x), o.y = fmaf(other.y, factor, o.y), o.z = fmaf(other.z, factor, o.z),
    o.w = fmaf(other.w, factor, o.w);
    sum = fmaf(state.y, factor, sum);
  }
  __device__ __forceinline__ float inverse() const {
    return sum > 0.f ? __fdividef(1.f, sum) : 0.f;
  }  // no key: the output is 0
};

// Results of up to SOURCES sources in shared memory: [source, row, column], then [source, row] states. Chunks of four
// columns are moved by exclusive-or, so that eight lanes that write two chunks of four even rows meet eight bank
// groups.
template <int SOURCES, int ROWS, int HEAD_DIM> struct MergeBuffer {
  static constexpr int CHUNKS = HEAD_DIM / 4, PITCH = (CHUNKS + 7) / 8 * 8;
  static constexpr int O_BYTES = SOURCES * ROWS * PITCH * 16, BYTES = O_BYTES + SOURCES * ROWS * 8;
  unsigned char* smem;

  __device__ __forceinline__ float* place(int source, int row, int column) const {
    const int chunk = (column / 4) ^ (row / 2 % 2 * 4 + row / 4 % 2);
    return reinterpret_cast<float*>(smem) + ((source * ROWS + row) * PITCH + chunk) * 4 + column % 4;
  }
  __device__ __forceinline__ float2* state(int source, int row) const {
    return reinterpret_cast<float2*>(smem + O_BYTES) + source * ROWS + row;
  }
  // Chunk `chunk` of row `row`, of `sources` sources.
  __device__ __forceinline__ RowShare total(int sources, int row, int chunk) const {
    RowShare share;
#pragma unroll
    for (int i = 0; i < sources; ++i) share.shift = fmaxf(share.shift, state(i, row)->x);
#pragma unroll
    for (int i = 0; i < sources; ++i)
      share.add(*reinterpret_cast<const float4*>(place(i, row, chunk * 4)), *state(i, row));
    return share;
  }
};

// Other blocks wrote it in this very kernel: not through L1, which may hold what was there before.
__device__ __forceinline__ float4 load_fresh(const float4* source_gmem) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(source_gmem)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 load_fresh(const float2* source_gmem) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(source_gmem) : "memory");
  return x;
}

// The results of `splits` splits for `rows` rows into the sources of a merge buffer, by all THREADS of the block: as
// many threads share a chunk as there are for it. Returns the sources filled. A barrier must follow.
template <int THREADS, int SOURCES, int ROWS, int HEAD_DIM>
__device__ __forceinline__ int gather_splits(
    const MergeBuffer<SOURCES, ROWS, HEAD_DIM>& buffer,
    const float4* partial_gmem,  // [splits, split_rows, HEAD_DIM / 4], from the first row on
    const float2* state_gmem,    // [splits, split_rows]
    int splits, int split_rows, int rows) {
  constexpr int CHUNKS = HEAD_DIM / 4, IN_FLIGHT = 8;  // loads per thread
  const int sources = min(SOURCES, max(1, THREADS / (CHUNKS * rows)));
  for (int i = threadIdx.x; i < sources * rows * CHUNKS; i += THREADS) {
    const int chunk = i % CHUNKS, row = i / CHUNKS % rows, source = i / CHUNKS / rows;
    RowShare share;
    for (int first = source; first < splits; first += IN_FLIGHT * sources) {
      float2 state[IN_FLIGHT];
      float4 o[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        const int split = first + j * sources, at = split * split_rows + row;
        state[j] = make_float2(NO_KEY, 0.f), o[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (split < splits)
          state[j] = load_fresh(state_gmem + at), o[j] = load_fresh(partial_gmem + int64_t(at) * CHUNKS + chunk);
      }
      float highest = state[0].x;
#pragma unroll
      for (int j = 1; j < IN_FLIGHT; ++j) highest = fmaxf(highest, state[j].x);
      share.raise(highest);
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) share.add(o[j], state[j]);
    }
    *reinterpret_cast<float4*>(buffer.place(source, row, chunk * 4)) = share.o;
    if (chunk == 0) *buffer.state(source, row) = make_float2(share.shift, share.sum);
  }
  return sources;
}
