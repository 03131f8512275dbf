// sums.cuh: fp32 sums of a gradient in global memory, to which several blocks add. A tile of rows lies there as mma's
// fragments do, [tile of 16 rows][tile of 8 columns][32 lanes, 4 values each], so that a warp adds 512 bytes in a row:
// with VECTORS four values of a lane are neighbours, otherwise those of the 32 lanes.
#include "device/ptx/element.cuh"
#include "device/ptx/red.cuh"
#include "device/copy/vector.cuh"

// A warp's fragments: every ROWS_APART-th tile of 16 rows, every APART-th block of 16 of `TILES_A_ROW` tiles of 8.
template <bool VECTORS, int TILES_A_ROW, int ROWS_APART, int APART, int ROW_TILES, int TILES>
__device__ __forceinline__ void add_to_sums(const float (&x)[ROW_TILES][TILES][4], float* tile_gmem, int first_row_tile,
                                            int first_block, int blocks, int lane) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      if (APART > 1 && n / 2 >= blocks) break;
      const int column_tile = 2 * (first_block + n / 2 * APART) + n % 2;
      float* fragment_gmem = tile_gmem + ((first_row_tile + m * ROWS_APART) * TILES_A_ROW + column_tile) * 128;
      if constexpr (VECTORS) {
        red_add_v4(fragment_gmem + lane * 4, x[m][n][0], x[m][n][1], x[m][n][2], x[m][n][3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) red_add(fragment_gmem + i * 32 + lane, x[m][n][i]);
      }
    }
}

// Of a tile of `ROWS` rows what was added up, times scale, by all threads of the block. A thread takes 8 columns of
// rows g and g + 8.
template <bool VECTORS, int ROWS, int TILES_A_ROW, int CHUNKS, int THREADS, typename Element>
__device__ __forceinline__ void store_sums(const float* tile_gmem, float scale, Element* out_gmem, int64_t row_stride,
                                           int valid_rows) {
  for (int i = threadIdx.x; i < ROWS / 2 * CHUNKS; i += THREADS) {
    const int chunk = i % CHUNKS, g = i / CHUNKS % 8, row_tile = i / CHUNKS / 8;
    const float4* fragment_gmem =
        reinterpret_cast<const float4*>(tile_gmem + (row_tile * TILES_A_ROW + chunk) * 128) + (VECTORS ? 4 * g : g);
    float x[4][4];  // VECTORS: [lane of the row][value], else [value][lane of the row]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 four = fragment_gmem[VECTORS ? j : j * 8];
      x[j][0] = four.x, x[j][1] = four.y, x[j][2] = four.z, x[j][3] = four.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row[8];
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const int of_lane = column / 2, value = 2 * half + column % 2;
        row[column] = (VECTORS ? x[of_lane][value] : x[value][of_lane]) * scale;
      }
      const int number = row_tile * 16 + half * 8 + g;
      if (number < valid_rows) store_floats<8>(out_gmem + number * row_stride + chunk * 8, row);
    }
  }
}
