// own_rows.cuh: a warp's rows of products, and results in shared and global memory.
#include "device/mma/products.cuh"

// A warp's rows as mma's A operand, STEPS k16 steps of head_dim. IN_REGISTERS: read once from global memory, else by
// ldmatrix from shared memory for every product. CHUNKS are the real chunks of 8 columns.
template <typename Element, typename Layout, int ROW_TILES, int STEPS, int CHUNKS, bool IN_REGISTERS> struct OwnRows {
  uint32_t rows_smem;  // rows_first
  __device__ __forceinline__ void load(uint32_t warp_smem, const Element* warp_gmem, int64_t row_stride, int valid_rows,
                                       int lane) {
    rows_smem = warp_smem + Layout::rows_first(lane);
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int m, int step) const {
    ldmatrix_x4(a, Layout::block_address(rows_smem, m, step));
  }
};
template <typename Element, typename Layout, int ROW_TILES, int STEPS, int CHUNKS>
struct OwnRows<Element, Layout, ROW_TILES, STEPS, CHUNKS, true> {
  uint32_t kept[ROW_TILES][STEPS][4];
  __device__ __forceinline__ void load(uint32_t warp_smem, const Element* warp_gmem, int64_t row_stride, int valid_rows,
                                       int lane) {
    const Element* lane_gmem = warp_gmem + lane / 4 * row_stride + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = m * 16 + i % 2 * 8, chunk = 2 * step + i / 2;
          const bool valid = chunk < CHUNKS && lane / 4 + row < valid_rows;
          kept[m][step][i] = valid ? *reinterpret_cast<const uint32_t*>(lane_gmem + row * row_stride + chunk * 8) : 0;
        }
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int m, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = kept[m][step][i];
  }
};

// X · scale as 16-bit elements into a tile of shared memory: the warp's rows, every APART-th block of 16 columns.
template <typename Element, typename Layout, int APART, int ROW_TILES, int TILES>
__device__ __forceinline__ void store_rows(const float (&x)[ROW_TILES][TILES][4], float scale, unsigned char* tile_smem,
                                           int first_row, int first_block, int blocks, int lane) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      if (APART > 1 && n / 2 >= blocks) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + m * 16 + half * 8 + lane / 4, chunk = 2 * (first_block + n / 2 * APART) + n % 2;
        *reinterpret_cast<uint32_t*>(tile_smem + Layout::offset(row, chunk) + lane % 4 * 4) =
            pack2<Element>(x[m][n][2 * half] * scale, x[m][n][2 * half + 1] * scale);
      }
    }
}

// The rows of a tile of shared memory to global memory by all threads of the block.
template <typename Layout, int ROWS, int CHUNKS, int THREADS, typename Element>
__device__ __forceinline__ void copy_out(const unsigned char* tile_smem, Element* tile_gmem, int64_t row_stride,
                                         int valid_rows) {
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (row < valid_rows) {
      *reinterpret_cast<uint4*>(tile_gmem + row * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile_smem + Layout::offset(row, chunk));
    }
  }
}
