// query_sums.cuh: dQ as blocks add it up in global memory, in float32 and in the order of wgmma's accumulators, and how
// it becomes rows.
//
// A tile of 64 × COLUMNS accumulators is 4 · COLUMNS / 8 pieces of 32 × 16 bytes, those of a warp behind one another:
// lane 4 g + t has of piece i columns 8 i + 2 t and the next one, of rows g and g + 8 of the warp's sixteen.
#include "device/ptx/element.cuh"
#include "device/copy/vector.cuh"

// ROWS queries × COLUMNS dimensions, in tiles of 64 queries × TILE_COLUMNS; or, BY_DIMS, of 64 dimensions × all ROWS
// queries.
template <int ROWS, int COLUMNS, int TILE_COLUMNS, bool BY_DIMS> struct QuerySums {
  static constexpr int FLOATS = ROWS * COLUMNS;
  static constexpr int LENGTH = BY_DIMS ? ROWS : TILE_COLUMNS;  // of a tile, along the accumulators of a lane
  static constexpr int TILE_FLOATS = 64 * LENGTH;               // of a tile
  static constexpr int WARP_FLOATS = 16 * LENGTH;               // of a warp's part of it
  static constexpr int TILES_ALONG = BY_DIMS ? 1 : COLUMNS / TILE_COLUMNS;  // tiles of the same 64 queries

  static __device__ __forceinline__ void clear(float* sums_gmem, int thread, int threads) {
    for (int i = thread; i < FLOATS / 4; i += threads)
      reinterpret_cast<float4*>(sums_gmem)[i] = make_float4(0, 0, 0, 0);
  }

  // Rows 0 to `rows` - 1 of DIM columns, times `scale`.
  template <int DIM, typename Element>
  static __device__ __forceinline__ void to_rows(const float* sums_gmem, Element* dq_gmem, int64_t row_stride, int rows,
                                                 float scale, int thread, int threads) {
    const float4* sums = reinterpret_cast<const float4*>(sums_gmem);
    for (int i = thread; i < FLOATS / 16; i += threads) {  // sixteen numbers each: 8 dimensions of two queries
      float low[8], high[8];
      int query, dim, apart;    // of `low`; `high` is of query + apart
      if constexpr (BY_DIMS) {  // low, high: queries 2 t, 2 t + 1 of eight; rows g = 0 to 7 of a half of sixteen
        const int t = i % 4, half = i / 4 % 2, piece = i / 8 % (LENGTH / 8), warp = i / LENGTH % 4,
                  tile = i / LENGTH / 4;
        const float* from = sums_gmem + tile * TILE_FLOATS + warp * WARP_FLOATS + piece * 128 + t * 4 + half * 2;
#pragma unroll
        for (int g = 0; g < 8; ++g) {
          const float2 pair = *reinterpret_cast<const float2*>(from + g * 16);
          low[g] = pair.x, high[g] = pair.y;
        }
        query = piece * 8 + 2 * t, apart = 1, dim = tile * 64 + warp * 16 + half * 8;
      } else {  // low, high: rows g and g + 8; columns 8 piece to 8 piece + 7
        const int g = i % 8, piece = i / 8 % (LENGTH / 8), warp = i / LENGTH % 4, tile = i / LENGTH / 4;
        const float4* from = sums + (tile * TILE_FLOATS + warp * WARP_FLOATS + piece * 128) / 4 + g * 4;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float4 four = from[t];
          low[2 * t] = four.x, low[2 * t + 1] = four.y, high[2 * t] = four.z, high[2 * t + 1] = four.w;
        }
        query = tile / TILES_ALONG * 64 + warp * 16 + g, apart = 8;
        dim = tile % TILES_ALONG * TILE_COLUMNS + piece * 8;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) low[e] *= scale, high[e] *= scale;
      if (dim < DIM) {
        if (query < rows) store_floats(dq_gmem + query * row_stride + dim, low);
        if (query + apart < rows) store_floats(dq_gmem + (query + apart) * row_stride + dim, high);
      }
    }
  }
};
