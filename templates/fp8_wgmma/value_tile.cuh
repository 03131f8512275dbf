// value_tile.cuh: a tile of V of 8 bits as the B operand of wgmma, which wants the keys of a column of V next to one
// another: [VALUE_DIM, BLOCK_N], in chunks of WIDTH keys with the swizzle of that width.
//
// Of every 16 keys place 4t + e has key 2t + e % 2 + e / 2 · 8: those that lane t of a quad has of two accumulators of
// Q Kᵀ. Its probabilities are then the A operand as they stand, four to a register.
#include "device/ptx/byte_permute.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/shared_words.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"

template <int VALUE_DIM, int BLOCK_N> struct ValueTile {
  static constexpr int WIDTH = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32;  // bytes of a row of a chunk
  static constexpr int CHUNK_BYTES = VALUE_DIM * WIDTH;
  static constexpr int BYTES = (VALUE_DIM * BLOCK_N + 1023) / 1024 * 1024;
  static_assert(BLOCK_N % 32 == 0 && VALUE_DIM % 16 == 0, "whole pieces");

  static __device__ __forceinline__ uint64_t descriptor(uint32_t tile_smem) {
    constexpr uint64_t LAYOUT = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
    return uint64_t((tile_smem & 0x3FFFF) >> 4) | uint64_t(8 * WIDTH >> 4) << 32 | LAYOUT << 62;
  }
  // Where 32 keys begin.
  static constexpr __device__ __forceinline__ int step_offset(int step) {
    return step * 32 / WIDTH * CHUNK_BYTES + step * 32 % WIDTH;
  }
  // The tile at `loaded_smem`, rows of keys as a tensor map brought them, into the place at `tile_smem`: the part of
  // warp `warp` of WARPS. A piece is 32 keys of 16 columns: of a quad's lanes each gets two keys of two columns at a
  // time, makes them four keys of one column, and the eight columns that stmatrix takes at once lie in all banks.
  template <int WARPS>
  static __device__ __forceinline__ void transpose(uint32_t loaded_smem, uint32_t tile_smem, int warp, int lane) {
    constexpr int COLUMN_PIECES = VALUE_DIM / 16, PIECES = BLOCK_N / 32 * COLUMN_PIECES;
    const uint32_t own = lane & 16 ? 0x7531 : 0x6420, other = own ^ (0x7531 ^ 0x6420);
    const int row = lane % 8, half = lane / 16;  // half: which 16 keys this lane's address is of
    const int column = 2 * row + ((row >= 4) ^ (lane >> 3 & 1));
    constexpr int ROWS_A_LINE = 128 / WIDTH, MASK = WIDTH / 16 - 1;
    const int swizzle = column / ROWS_A_LINE & MASK;
    // The keys of a step and 16 columns.
    auto load = [&](uint32_t(&v)[4], int piece) {
      const int step = piece / COLUMN_PIECES, columns = piece % COLUMN_PIECES;
      ldmatrix_x4_trans(
          v, loaded_smem + columns / 8 * BLOCK_N * 128 + (step * 32 + lane) * 128 + ((columns ^ lane) & 7) * 16);
    };
    auto store = [&](const uint32_t(&v)[4], int piece) {
      const int step = piece / COLUMN_PIECES, columns = piece % COLUMN_PIECES, chunk = step * 32 % WIDTH / 16 + half;
      stmatrix_x4(
          tile_smem + step * 32 / WIDTH * CHUNK_BYTES + (columns * 16 + column) * WIDTH + (chunk ^ swizzle) * 16,
          byte_permute(v[0], v[1], own), byte_permute(v[0], v[1], other), byte_permute(v[2], v[3], own),
          byte_permute(v[2], v[3], other));
    };
    uint32_t v[2][4];  // two loads are under way together
#pragma unroll 1
    for (int piece = warp; piece < PIECES; piece += 2 * WARPS) {
      load(v[0], piece);
      if (piece + WARPS < PIECES) load(v[1], piece + WARPS);
      store(v[0], piece);
      if (piece + WARPS < PIECES) store(v[1], piece + WARPS);
    }
  }
};

// V as tensor maps bring it: rows of keys; or TURNED, as `Value` has it, keys of a column in a row of a chunk.
template <class Value, int VALUE_DIM> struct TurnedTiles {
  static constexpr __host__ __device__ int bytes(int keys) { return Value::BYTES; }

  // Through a map [batch, heads, VALUE_DIM, keys / 2] of 16 bits, boxes of a chunk.
  template <int KEYS>
  static __device__ __forceinline__ void load(uint32_t tile_smem, const TensorMap& map, uint32_t barrier_smem,
                                              int first_key, int head, int batch) {
    mbarrier_arrive_expect_tx(barrier_smem, KEYS * VALUE_DIM);
#pragma unroll
    for (int i = 0; i < KEYS / Value::WIDTH; ++i)
      tma_load_4d(tile_smem + i * Value::CHUNK_BYTES, map, barrier_smem, (first_key + i * Value::WIDTH) / 2, 0, head,
                  batch);
  }
};
template <class Value, int VALUE_DIM, bool TURNED> struct TileOfValues {
  using Type = TensorTile<VALUE_DIM / 2>;
};
template <class Value, int VALUE_DIM> struct TileOfValues<Value, VALUE_DIM, true> {
  using Type = TurnedTiles<Value, VALUE_DIM>;
};
