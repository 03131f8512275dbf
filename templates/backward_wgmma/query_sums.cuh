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

  // Whether any of a warp's piece is of rows 0 to `rows` - 1 and of DIM columns: no other is read at last.
  template <int DIM> static __device__ __forceinline__ bool needed(int warp, int piece, int rows) {
    const int tile = warp / 4;
    if constexpr (BY_DIMS) return warp * 16 < DIM && piece * 8 < rows;
    return tile / TILES_ALONG * 64 + warp % 4 * 16 < rows && tile % TILES_ALONG * TILE_COLUMNS + piece * 8 < DIM;
  }
  // Of a piece: the first one in place of those that are not needed, so that reads need no branch.
  template <int DIM> static __device__ __forceinline__ int place(int warp, int piece, int rows) {
    return needed<DIM>(warp, piece, rows) ? warp * WARP_FLOATS + piece * 128 : 0;
  }
  template <int DIM> static __device__ __forceinline__ void clear(float* sums_gmem, int rows, int thread, int threads) {
    for (int i = thread; i < FLOATS / 4; i += threads) {
      if (needed<DIM>(i / (WARP_FLOATS / 4), i % (WARP_FLOATS / 4) / 32, rows))
        reinterpret_cast<float4*>(sums_gmem)[i] = make_float4(0, 0, 0, 0);
    }
  }

  // Rows 0 to `rows` - 1 of DIM columns, times `scale`; the loop is unrolled AT_ONCE times. Of PARTS
  // sums, each APART floats behind the one before, their total.
  template <int DIM, int AT_ONCE, int PARTS = 1, int APART = 0, typename Element>
  static __device__ __forceinline__ void to_rows(const float* sums_gmem, Element* dq_gmem, int64_t row_stride, int rows,
                                                 float scale, int thread, int threads) {
#pragma unroll AT_ONCE
    for (int i = thread; i < FLOATS / 8; i += threads) {  // eight numbers each: 4 dimensions of two queries
      constexpr int PIECES = LENGTH / 8;
      float low[4], high[4];
      int query, dim, apart;    // of `low`; `high` is of query + apart
      if constexpr (BY_DIMS) {  // low, high: queries 2 t, 2 t + 1 of eight; four of the sixteen rows
        const int quarter = i % 4, t = i / 4 % 4, piece = i / 16 % PIECES, warp = i / 16 / PIECES;
        const float* from = sums_gmem + quarter % 2 * 64 + t * 4 + quarter / 2 * 2 + place<DIM>(warp, piece, rows);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          low[g] = 0.f, high[g] = 0.f;
#pragma unroll
          for (int part = 0; part < PARTS; ++part) {
            const float2 pair = *reinterpret_cast<const float2*>(from + g * 16 + part * APART);
            low[g] += pair.x, high[g] += pair.y;
          }
        }
        query = piece * 8 + 2 * t, apart = 1, dim = warp * 16 + quarter * 4;
      } else {  // low, high: rows g and g + 8 of sixteen; four columns of a piece
        const int half = i % 2, piece = i / 2 % PIECES, g = i / 2 / PIECES % 8, warp = i / 16 / PIECES;
        const float4* from =
            reinterpret_cast<const float4*>(sums_gmem + g * 16 + half * 8 + place<DIM>(warp, piece, rows));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          float4 four = from[t];
#pragma unroll
          for (int part = 1; part < PARTS; ++part) {
            const float4 more = from[t + part * (APART / 4)];
            four.x += more.x, four.y += more.y, four.z += more.z, four.w += more.w;
          }
          low[2 * t] = four.x, low[2 * t + 1] = four.y, high[2 * t] = four.z, high[2 * t + 1] = four.w;
        }
        const int tile = warp / 4;
        query = tile / TILES_ALONG * 64 + warp % 4 * 16 + g, apart = 8;
        dim = tile % TILES_ALONG * TILE_COLUMNS + piece * 8 + half * 4;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) low[e] *= scale, high[e] *= scale;
      if (dim < DIM) {
        if (query < rows) store_floats(dq_gmem + query * row_stride + dim, low);
        if (query + apart < rows) store_floats(dq_gmem + (query + apart) * row_stride + dim, high);
      }
    }
  }
};
