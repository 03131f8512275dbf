// tensor_tile.cuh: tiles of rows of [batch, heads, seqlen, HEAD_DIM] in shared memory, as tensor maps bring them and
// wgmma reads them: chunks of 64 columns, in each rows of 128 bytes with the 128-byte swizzle. Columns past HEAD_DIM
// and rows past seqlen read zero.
#include "device/ptx/element.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/ldmatrix.cuh"

template <int HEAD_DIM> struct TensorTile {
  static constexpr int CHUNKS = (HEAD_DIM + 63) / 64;
  static constexpr int DIM_STEPS = (HEAD_DIM + 15) / 16;  // k16 steps along a row
  // One copy per tile through a map [batch, heads, chunks, rows, 64]; or one per chunk through a map [batch, heads,
  // rows, HEAD_DIM].
  static constexpr bool WHOLE_CHUNKS = HEAD_DIM % 64 == 0;
  static constexpr __host__ __device__ int bytes(int rows) { return CHUNKS * rows * 128; }

  // Rows `first_row` to first_row + ROWS - 1; bytes(ROWS) arrive at `barrier_smem`.
  template <int ROWS>
  static __device__ __forceinline__ void load(uint32_t tile_smem, const TensorMap& map, uint32_t barrier_smem,
                                              int first_row, int head, int batch) {
    mbarrier_arrive_expect_tx(barrier_smem, bytes(ROWS));
    if constexpr (WHOLE_CHUNKS) {
      tma_load_5d(tile_smem, map, barrier_smem, 0, first_row, 0, head, batch);
    } else {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i)
        tma_load_4d(tile_smem + i * ROWS * 128, map, barrier_smem, 64 * i, first_row, head, batch);
    }
  }
  template <int ROWS>
  static __device__ __forceinline__ void store(const TensorMap& map, uint32_t tile_smem, int first_row, int head,
                                               int batch) {
    if constexpr (WHOLE_CHUNKS) {
      tma_store_5d(map, tile_smem, 0, first_row, 0, head, batch);
    } else {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) tma_store_4d(map, tile_smem + i * ROWS * 128, 64 * i, first_row, head, batch);
    }
    tma_store_commit();
  }
  // Chunk `chunk` of a tile of 64 rows, through a map whose boxes are one chunk.
  static __device__ __forceinline__ void store_chunk(const TensorMap& map, uint32_t chunk_smem, int chunk,
                                                     int first_row, int head, int batch) {
    if constexpr (WHOLE_CHUNKS) tma_store_5d(map, chunk_smem, 0, first_row, chunk, head, batch);
    else tma_store_4d(map, chunk_smem, 64 * chunk, first_row, head, batch);
    tma_store_commit();
  }
  // The same of a sequence through a map that slides (tensor_tiles.py), whose rows past the sequence's `length` read
  // zero and are not written; its last row lies before row `end` of the head.
  static constexpr int SLIDING_ROWS = 1 << 30;
  template <int ROWS>
  static __device__ __forceinline__ void load_sliding(uint32_t tile_smem, const TensorMap& map, uint32_t barrier_smem,
                                                      int first_row, int length, int end, int head) {
    mbarrier_arrive_expect_tx(barrier_smem, bytes(ROWS));
    load_sliding_box<ROWS>(tile_smem, map, barrier_smem, first_row, length, end, head);
  }
  // The rows of a box, which may be a part of a tile's ROWS: `box_smem` is the place of the first.
  template <int ROWS>
  static __device__ __forceinline__ void load_sliding_box(uint32_t box_smem, const TensorMap& map,
                                                          uint32_t barrier_smem, int first_row, int length, int end,
                                                          int head) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      tma_load_5d(box_smem + i * ROWS * 128, map, barrier_smem, 64 * i, SLIDING_ROWS - length + first_row, head, end,
                  SLIDING_ROWS);
    }
  }
  // Of 64 rows, chunks FIRST to LAST - 1, which lie one behind the other.
  static __device__ __forceinline__ void store_sliding(const TensorMap& map, uint32_t chunks_smem, int first_chunk,
                                                       int end_chunk, int first_row, int length, int end, int head) {
    for (int i = first_chunk; i < end_chunk; ++i) {
      tma_store_5d(map, chunks_smem + (i - first_chunk) * 64 * 128, 64 * i, SLIDING_ROWS - length + first_row, head,
                   end, SLIDING_ROWS);
    }
    tma_store_commit();
  }
  // Where k16 step `step` along the rows begins.
  static constexpr __device__ __forceinline__ int step_offset(int step, int rows) {
    return step / 4 * rows * 128 + step % 4 * 32;
  }
};

// A tile of 64 rows as wgmma's A operand, a k16 step at a time: in registers, or where it lies in shared memory.
template <int HEAD_DIM, bool IN_REGISTERS> struct RowOperand;

template <int HEAD_DIM> struct RowOperand<HEAD_DIM, false> {
  uint64_t descriptor;
  __device__ __forceinline__ void load(uint32_t tile_smem, int warp, int lane) {
    descriptor = matrix_descriptor(tile_smem, 0);
  }
  __device__ __forceinline__ uint64_t operator[](int step) const {
    return descriptor + descriptor_step(TensorTile<HEAD_DIM>::step_offset(step, 64));
  }
  // The step as a fragment of the warp's 16 rows.
  static __device__ __forceinline__ void fragment(uint32_t (&frag)[4], int step, uint32_t tile_smem, int warp,
                                                  int lane) {
    const int row = warp * 16 + lane % 16, column = (step % 4 * 2 + lane / 16) ^ (row % 8);
    ldmatrix_x4(frag, tile_smem + step / 4 * 64 * 128 + row * 128 + column * 16);
  }
};

template <int HEAD_DIM> struct RowOperand<HEAD_DIM, true> {
  uint32_t frag[TensorTile<HEAD_DIM>::DIM_STEPS][4];
  __device__ __forceinline__ void load(uint32_t tile_smem, int warp, int lane) {
#pragma unroll
    for (int step = 0; step < TensorTile<HEAD_DIM>::DIM_STEPS; ++step) {
      RowOperand<HEAD_DIM, false>::fragment(frag[step], step, tile_smem, warp, lane);
    }
  }
  __device__ __forceinline__ const uint32_t (&operator[](int step) const)[4] { return frag[step]; }
  __device__ __forceinline__ void fragment(uint32_t (&copy)[4], int step, uint32_t tile_smem, int warp,
                                           int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy[i] = frag[step][i];
  }
};
