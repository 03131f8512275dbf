// operands.cuh: how elements of 16 bits lie as operands of wgmma and of mma. Those of 8 bits: fp8_wgmma/operands.cuh.
#include "flash_wgmma/running_scales.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/softmax/wgmma_softmax.cuh"

// LANE_ROWS: of a tile of rows, that are any of an answer: 1: rows g of a warp, not g + 8.
template <typename Element, int HEAD_DIM, int VALUE_DIM, int BLOCK_N, int LANE_ROWS = 2> struct SixteenBitOperands {
  static constexpr int STEP_KEYS = 16;            // of a step of P V
  static constexpr int ROW_COLUMNS = HEAD_DIM;    // of 16 bits, in a row of Q and K
  static constexpr int QUERY_COLUMNS = HEAD_DIM;  // in one of Q as it comes
  static constexpr bool MAKES_ROWS = false;       // Q is multiplied as it comes
  static constexpr bool LEVELS = false;           // scores of rows that are made have one unit
  static constexpr int ROWS_OF_LANE = LANE_ROWS;
  static constexpr bool PAIRS = false;                                       // scores come in fp32
  static constexpr int LINES = 0;                                            // with PAIRS alone
  using LoadedTiles = TensorTile<VALUE_DIM>;                                 // V as it comes
  static constexpr int VALUE_BYTES = TensorTile<VALUE_DIM>::bytes(BLOCK_N);  // of a tile of V as it is multiplied
  static constexpr int TRANSPOSERS = 0;          // warps that turn V round: it is multiplied as it lies
  static constexpr int MAKERS = 0;               // of their lanes those that say that a tile is made
  static constexpr bool CONVERTS = false;        // nor do they make K and V of others
  using LoadedKeys = TensorTile<HEAD_DIM>;       // K as it comes
  static constexpr bool VALUES_IN_KEYS = false;  // V has tiles of its own
  static constexpr int HELPERS = 0, COLUMN_SHARERS = 1, HANDED_BYTES = 0;  // see latent_wgmma/operands.cuh
  using Range = WholeRange;                                                // of P

  // V is a B operand whose chunks run along its columns.
  static __device__ __forceinline__ uint64_t value_descriptor(uint32_t tile_smem) {
    return matrix_descriptor(tile_smem, BLOCK_N * 128);
  }
  static constexpr __device__ __forceinline__ int value_step(int step) { return step * 16 * 128; }
  static constexpr __device__ __forceinline__ int value_columns(int columns) { return 0; }  // all at once
  template <int STEPS>
  static __device__ __forceinline__ void pack(uint32_t (&p)[STEPS][4], const float (&s)[8 * STEPS]) {
    pack_probabilities<Element, LANE_ROWS>(p, s);
  }
  // C += A B of one warp, 32 bytes of each row of A and column of B.
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16<Element>(c, a, b0, b1);
  }
  template <class Smem, class Block> static __device__ __forceinline__ void transpose(const Block& block) {}
};

// Numbers that need no scales.
struct NoScales {
  static constexpr bool GIVEN = false, BY_BLOCK = false, BY_KEY = false;
  using Running = NoBlockScales;
  using Ahead = NoScalesAhead;
  __device__ __forceinline__ float of_scores(int batch, int kv_head) const { return 1.f; }
  __device__ __forceinline__ float of_values(int batch, int kv_head) const { return 1.f; }
};
