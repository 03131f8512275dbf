// products.cuh: the products of the backward pass for the rows of one warp, in mma fragments. Fragments are in the
// order of mma_m16n8k16's c: [tile of 16 rows][tile of 8 columns][row g: 0 1 | row g + 8: 2 3].
#include "device/ptx/element.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/copy/swizzle.cuh"

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

// C = A Bᵀ over STEPS k16 steps; the columns of C are rows of B.
template <typename Element, typename Layout, int STEPS, class Rows, int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void multiply_rows(float (&c)[ROW_TILES][COLUMN_TILES][4], const Rows& rows,
                                              uint32_t columns_smem) {  // [8 COLUMN_TILES, 16 STEPS], chunks_first
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    uint32_t a[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) rows.fragment(a[m], m, step);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n += 2) {
      uint32_t b[4];  // dims 0-7, 8-15 of rows 0-7, then of rows 8-15
      ldmatrix_x4(b, Layout::block_address(columns_smem, n / 2, step));
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        mma_m16n8k16<Element>(c[m][n], a[m], b[0], b[1]);
        mma_m16n8k16<Element>(c[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// X += A B over the 16 rows of B of k-step `step`. The warp has every APART-th block of 16 columns, of which there are
// `blocks`; those addresses stay a constant apart under the swizzle, APART being a power of two.
template <typename Element, typename Layout, int APART, int ROW_TILES, int TILES>
__device__ __forceinline__ void add_product(float (&x)[ROW_TILES][TILES][4], const uint32_t (&a)[ROW_TILES][4],
                                            uint32_t b_smem,  // [rows, columns of all warps], rows_first of its own
                                            int step, int blocks) {
#pragma unroll
  for (int block = 0; block < TILES / 2; ++block) {
    if (APART > 1 && block >= blocks) break;
    uint32_t b[4];  // transposed: rows 0-7, 8-15 of columns 0-7, then of columns 8-15
    ldmatrix_x4_trans(b, Layout::block_address(b_smem, step, block * APART));
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      mma_m16n8k16<Element>(x[m][2 * block], a[m], b[0], b[1]);
      mma_m16n8k16<Element>(x[m][2 * block + 1], a[m], b[2], b[3]);
    }
  }
}

template <int ROW_TILES, int TILES> __device__ __forceinline__ void clear(float (&x)[ROW_TILES][TILES][4]) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < TILES; ++n) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0.f;
}

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
