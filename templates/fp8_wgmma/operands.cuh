// operands.cuh: how numbers of 8 bits (e4m3) lie as operands of wgmma and of mma. Tensor maps bring them as columns of
// 16 bits. Those of 16 bits: flash_wgmma/operands.cuh.
#include "device/ptx/e4m3.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_words.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/ring_position.cuh"
#include "flash_wgmma/head_scales.cuh"
#include "flash_wgmma/running_scales.cuh"
#include "device/softmax/wgmma_softmax.cuh"
#include "fp8_wgmma/value_tile.cuh"

// The range of e4m3, from 2^-9 on, is used up to 2^8, which is P at a row's maximum.
struct E4m3Range : WholeRange {
  static constexpr int TOP = 8;
  static constexpr bool MAX_OF_BITS = true;
};

// TURNED: V comes as wgmma wants it, so that no warp turns it round. ROUNDS: Q comes in 16 bits (`rounded_rows.cuh`).
// OF_PAIRS: scores come in fp16. OF_LINES of eight exponentials are straight lines.
template <int HEAD_DIM, int VALUE_DIM, int BLOCK_N, int STAGES, bool TURNED, bool ROUNDS, bool OF_PAIRS, int OF_LINES>
struct EightBitOperands {
  static constexpr int STEP_KEYS = 32;
  static constexpr int ROW_COLUMNS = HEAD_DIM / 2;
  static constexpr bool MAKES_ROWS = ROUNDS || OF_PAIRS, PAIRS = OF_PAIRS, LEVELS = false;
  static constexpr int LINES = OF_LINES;
  static constexpr int QUERY_COLUMNS = ROUNDS ? HEAD_DIM : ROW_COLUMNS;
  using Value = ValueTile<VALUE_DIM, BLOCK_N>;
  using LoadedTiles = typename TileOfValues<Value, VALUE_DIM, TURNED>::Type;
  static constexpr int VALUE_BYTES = Value::BYTES;
  static constexpr int FREE_WARPS = 3;  // beside the one that copies
  static constexpr int TRANSPOSERS = TURNED ? 0 : FREE_WARPS, MAKERS = TRANSPOSERS;
  static constexpr bool CONVERTS = false;  // K is multiplied as it comes
  using LoadedKeys = TensorTile<ROW_COLUMNS>;
  static constexpr bool VALUES_IN_KEYS = false;                            // V has tiles of its own
  static constexpr int HELPERS = 0, COLUMN_SHARERS = 1, HANDED_BYTES = 0;  // see latent_wgmma/operands.cuh
  using Range = E4m3Range;

  static __device__ __forceinline__ uint64_t value_descriptor(uint32_t tile_smem) {
    return Value::descriptor(tile_smem);
  }
  static constexpr __device__ __forceinline__ int value_step(int step) { return Value::step_offset(step); }
  // From a column of V to the one that lies so many after it.
  static constexpr __device__ __forceinline__ int value_columns(int columns) { return columns * Value::WIDTH; }
  template <int STEPS>
  static __device__ __forceinline__ void pack(uint32_t (&p)[STEPS][4], const float (&s)[16 * STEPS]) {
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
      const float* of = s + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
      p[i / 4][i % 4] = pack4_e4m3(of[0], of[1], of[4], of[5]);
    }
  }
  template <int STEPS>
  static __device__ __forceinline__ void pack(uint32_t (&p)[STEPS][4], const uint32_t (&pairs)[8 * STEPS]) {
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
      const uint32_t* of = pairs + i / 4 * 8 + i / 2 % 2 * 4 + i % 2;
      p[i / 4][i % 4] = pack4_e4m3(of[0], of[2]);
    }
  }
  // What the warps after the first of the producer's warpgroup do: each tile of V that has come, turned round for the
  // consumers, until a word says that no more will come.
  template <class Smem, class Block> static __device__ __forceinline__ void transpose(const Block& block) {
    RingPosition<STAGES> ring;
    for (;; ring.advance()) {
      mbarrier_wait(block.barrier(Smem::LOADED_FULL, ring.stage), ring.parity);
      int last[1];
      read_shared_words(block.smem_address + Smem::LAST + 4 * ring.stage, block.lane, last);
      if (last[0]) break;
      mbarrier_wait(block.barrier(Smem::V_EMPTY, ring.stage), ring.parity ^ 1);
      Value::template transpose<FREE_WARPS>(block.smem_address + Smem::LOADED + ring.stage * Smem::LOADED_TILE_BYTES,
                                            block.smem_address + Smem::V + ring.stage * Smem::V_TILE_BYTES,
                                            block.warp % 4 - 1, block.lane);
      fence_proxy_async();  // the products see what was written, and the next copy comes after what was read
      __syncwarp();
      if (block.lane == 0) {
        mbarrier_arrive(block.barrier(Smem::V_FULL, ring.stage));
        mbarrier_arrive(block.barrier(Smem::LOADED_EMPTY, ring.stage));
      }
    }
  }
};

// Q's too are of K/V heads, but BY_BLOCK; without OF_QUERIES it has none here.
template <bool OF_BLOCKS, int ROWS, bool OF_QUERIES> struct ScalesOf {
  static constexpr bool GIVEN = true, BY_BLOCK = OF_BLOCKS, BY_KEY = false;
  using Running = typename RunningScales<OF_BLOCKS, ROWS>::Type;
  using Ahead = typename RunningScales<OF_BLOCKS, ROWS>::Ahead;
  HeadScales q, k, v;
  __device__ __forceinline__ float of_scores(int batch, int kv_head) const {
    return (OF_QUERIES ? q.of(batch, kv_head) : 1.f) * k.of(batch, kv_head);
  }
  __device__ __forceinline__ float of_query_block(int batch, int head, int block) const {
    return OF_QUERIES ? q.of_block(q.of_head(batch, head), block) : 1.f;
  }
  __device__ __forceinline__ float of_values(int batch, int kv_head) const { return v.of(batch, kv_head); }
};
