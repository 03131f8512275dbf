// key_sums.cuh: QUERY_SPLIT > 1: dK and dV of the blocks that share a tile of keys, as each leaves them in global
// memory, in float32, and how the launch behind makes rows of their sums, always added in the same order. Needs the
// constants of backward_wgmma.cu.j2.
#include "device/schedule/sequences.cuh"
#include "backward_wgmma/query_sums.cuh"

struct KeySums {  // in the order of wgmma's accumulators (query_sums.cuh)
  using OfKeys = QuerySums<BLOCK_N, DKV_BY_DIMS ? 64 * DK_TILES : HEAD_DIM, DK_COLUMNS, DKV_BY_DIMS>;
  using OfValues = QuerySums<BLOCK_N, DKV_BY_DIMS ? 64 * DV_TILES : VALUE_DIM, DV_COLUMNS, DKV_BY_DIMS>;
  static constexpr int FLOATS = OfKeys::FLOATS + OfValues::FLOATS;  // of a part

  float* gmem;  // [K/V heads of all batches, tiles or slots of keys, QUERY_SPLIT, FLOATS]; SPLIT_LAST: of tiles split

  __device__ __forceinline__ float* part(int64_t place) const { return gmem + place * FLOATS; }
  // This lane's accumulators of a warp. `sums_gmem`: of the warpgroup.
  template <int TILES, int COUNT>
  static __device__ __forceinline__ void write(const float (&x)[TILES][COUNT], float* sums_gmem, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < TILES * COUNT; i += 4) {
      const float* four = x[i / COUNT] + i % COUNT;
      *reinterpret_cast<float4*>(sums_gmem + (i / COUNT * 128 + warp * 32) * COUNT + i % COUNT * 32 + lane * 4) =
          make_float4(four[0], four[1], four[2], four[3]);
    }
  }
};

// Of the launch behind.
struct KeyRows {
  float* sums_gmem;
  Element *dk_gmem, *dv_gmem;
  int64_t dk_batch_stride, dk_head_stride, dk_row_stride, dv_batch_stride, dv_head_stride, dv_row_stride;
  float softmax_scale;

  // A tile of keys, by ROW_THREADS of each of `shares` blocks. `place`: among the tiles that are split.
  __device__ __forceinline__ void write(int batch, int kv_head, const Sequence& sequence, int tile, int64_t place,
                                        int share, int shares) const {
    const int keys = sequence.keys - tile * BLOCK_N, thread = share * ROW_THREADS + threadIdx.x;
    const int64_t key = sequence.first_key + tile * BLOCK_N;
    const float* from = KeySums{sums_gmem}.part(place * QUERY_SPLIT);
    KeySums::OfKeys::to_rows<HEAD_DIM, 1, QUERY_SPLIT, KeySums::FLOATS>(
        from, dk_gmem + batch * dk_batch_stride + kv_head * dk_head_stride + key * dk_row_stride, dk_row_stride, keys,
        softmax_scale, thread, shares * ROW_THREADS);
    KeySums::OfValues::to_rows<VALUE_DIM, 1, QUERY_SPLIT, KeySums::FLOATS>(
        from + KeySums::OfKeys::FLOATS,
        dv_gmem + batch * dv_batch_stride + kv_head * dv_head_stride + key * dv_row_stride, dv_row_stride, keys, 1.f,
        thread, shares * ROW_THREADS);
  }
};
