// products.cuh: products by mma.sync for the rows of one warp, in fragments in the order of mma_m16n8k16's c: [tile of
// 16 rows][tile of 8 columns][row g: 0 1 | row g + 8: 2 3]. Operands of 8 bits have steps of 32, others of 16.
#include "device/ptx/element.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/copy/swizzle.cuh"

// C += A B of one step, of tiles of 16 rows and 8 columns.
template <typename Element> struct Mma {
  static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16<Element>(c, a, b0, b1);
  }
};

// A's rows in shared memory, read for every product.
template <typename Layout> struct SharedRows {
  uint32_t smem;  // rows_first
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int m, int step) const {
    ldmatrix_x4(a, Layout::block_address(smem, m, step));
  }
};

// A's rows in registers.
template <int ROW_TILES, int STEPS> struct KeptRows {
  const uint32_t (&kept)[ROW_TILES][STEPS][4];
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int m, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = kept[m][step][i];
  }
};

template <typename Sum, int ROW_TILES, int TILES> __device__ __forceinline__ void clear(Sum (&x)[ROW_TILES][TILES][4]) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < TILES; ++n) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
}

// C += A Bᵀ over STEPS steps; the columns of C are rows of B.
template <typename Element, typename Layout, int STEPS, class Rows, typename Sum, int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void add_rows(Sum (&c)[ROW_TILES][COLUMN_TILES][4], const Rows& rows,
                                         uint32_t columns_smem) {  // [8 COLUMN_TILES, STEPS of columns], chunks_first
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    uint32_t a[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) rows.fragment(a[m], m, step);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n += 2) {
      uint32_t b[4];  // the two halves of a step of rows 0-7, then of rows 8-15
      ldmatrix_x4(b, Layout::block_address(columns_smem, n / 2, step));
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        Mma<Element>::add(c[m][n], a[m], b[0], b[1]);
        Mma<Element>::add(c[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// C = A Bᵀ.
template <typename Element, typename Layout, int STEPS, class Rows, typename Sum, int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void multiply_rows(Sum (&c)[ROW_TILES][COLUMN_TILES][4], const Rows& rows,
                                              uint32_t columns_smem) {
  clear(c);
  add_rows<Element, Layout, STEPS>(c, rows, columns_smem);
}

// X += A B over the 16 rows of B of step `step`. The warp has every APART-th block of 16 columns, of which there are
// `blocks`; those addresses stay a constant apart under the swizzle, APART being a power of two.
template <typename Element, typename Layout, int APART, int ROW_TILES, int TILES>
__device__ __forceinline__ void add_product(float (&x)[ROW_TILES][TILES][4], const uint32_t (&a)[ROW_TILES][4],
                                            uint32_t b_smem,  // [rows, columns of all warps], rows_first of its own
                                            int step, int blocks = TILES / 2) {
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
  if constexpr (TILES % 2 != 0) {
    static_assert(APART == 1, "the last tile is this warp's");
    uint32_t b[2];
    ldmatrix_x2_trans(b, Layout::block_address(b_smem, step, TILES / 2));
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) mma_m16n8k16<Element>(x[m][TILES - 1], a[m], b[0], b[1]);
  }
}

// X += A B over STEPS steps.
template <typename Element, typename Layout, int STEPS, int APART, class Rows, int ROW_TILES, int TILES>
__device__ __forceinline__ void add_products(float (&x)[ROW_TILES][TILES][4], const Rows& rows, uint32_t b_smem) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    uint32_t a[ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) rows.fragment(a[m], m, step);
    add_product<Element, Layout, APART>(x, a, b_smem, step);
  }
}
