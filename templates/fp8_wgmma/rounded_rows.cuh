// rounded_rows.cuh: 64 rows of Q of 16 bits as wgmma's A operand of e4m3. Each warp makes numbers of its 16 rows, with
// one scale that takes the largest of them to the end of the range, so that Q is read once and no launch comes before.
#include "device/ptx/e4m3.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/largest2.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/copy/vector.cuh"

template <class Wide, int HEAD_DIM, bool IN_REGISTERS> struct RoundedRows : RowOperand<HEAD_DIM / 2, IN_REGISTERS> {
  static constexpr int STEPS = TensorTile<HEAD_DIM / 2>::DIM_STEPS;  // of 32 columns
  static constexpr float LARGEST = 448.f, LEAST_SCALE = 1.17549435e-38f, FINITE = 3.4028235e38f;

  // Of `tile`, at `tile_smem`, whose columns past HEAD_DIM read zero; returns the scale. Without IN_REGISTERS
  // numbers take the place of what they are made of, row by row; `meet` lets all warps of the warpgroup meet.
  template <typename Meet>
  __device__ __forceinline__ float round(unsigned char* tile, uint32_t tile_smem, int thread, Meet meet) {
    forget_origin(thread);  // or addresses would be kept in registers from tile to tile
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    uint32_t most = 0;
    for_parts(tile, row, lane, [&](int, int, const Vector<uint32_t, 2>& words) {
      most = larger2(larger2(most, words.at[0], Wide{}), words.at[1], Wide{});
    });
    float low, high;
    unpack2(most, Wide{}, low, high);
    float size = fmaxf(low, high);
    if (__any_sync(ALL_LANES, !is_number(size))) {  // infinities count for no scale
      size = 0.f;
      for_parts(tile, row, lane, [&](int, int, const Vector<uint32_t, 2>& words) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          unpack2(words.at[w], Wide{}, low, high);
          if (is_number(low)) size = fmaxf(size, fabsf(low));
          if (is_number(high)) size = fmaxf(size, fabsf(high));
        }
      });
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) size = fmaxf(size, __shfl_xor_sync(ALL_LANES, size, apart));
    const float scale = size > 0.f ? fmaxf(size / LARGEST, LEAST_SCALE) : 1.f, inverse = 1.f / scale;
    uint32_t own[IN_REGISTERS ? 1 : STEPS][4];
    auto& made = [&]() -> auto& {
      if constexpr (IN_REGISTERS) return this->frag;
      else return own;
    }();
    for_parts(tile, row, lane, [&](int step, int part, const Vector<uint32_t, 2>& words) {
      float x[4];
      unpack2(words.at[0], Wide{}, x[0], x[1]), unpack2(words.at[1], Wide{}, x[2], x[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = fmaf(x[i], 0.f, x[i] * inverse);  // of infinities NaN
      made[step][part] = pack4_e4m3(x[0], x[1], x[2], x[3]);
    });
    if constexpr (!IN_REGISTERS) {
      __syncwarp();  // all lanes have read the rows that numbers are written over
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int place = (step % 4 * 2 + part / 2) ^ (row % 8);
          *reinterpret_cast<uint32_t*>(tile + (step / 4 * 64 + row + part % 2 * 8) * 128 + place * 16 + lane % 4 * 4) =
              made[step][part];
        }
      fence_proxy_async();  // products see what was written
      meet();
      RowOperand<HEAD_DIM / 2, false>::load(tile_smem, 0, lane);
    }
    return scale;
  }

private:
  static __device__ __forceinline__ bool is_number(float x) { return fabsf(x) <= FINITE; }
  // body(step, part, the lane's four elements) for each register of the operand: columns 32 · step + 16 · (part / 2) +
  // 4 · (lane % 4) of rows `row` and `row` + 8 by turns.
  template <typename Body>
  static __device__ __forceinline__ void for_parts(const unsigned char* tile, int row, int lane, Body body) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int piece = step * 4 + part / 2 * 2 + lane % 4 / 2;  // of eight columns
        const unsigned char* of_row = tile + (piece / 8 * 64 + row + part % 2 * 8) * 128;
        body(step, part,
             load_vector<2>(reinterpret_cast<const uint32_t*>(of_row + ((piece ^ row) & 7) * 16 + lane % 2 * 8)));
      }
  }
};

// Rows that come as they are multiplied, or are rounded.
template <class Wide, int HEAD_DIM, bool IN_REGISTERS, bool ROUNDS> struct RowsOf {
  using Type = RowOperand<HEAD_DIM / 2, IN_REGISTERS>;
};
template <class Wide, int HEAD_DIM, bool IN_REGISTERS> struct RowsOf<Wide, HEAD_DIM, IN_REGISTERS, true> {
  using Type = RoundedRows<Wide, HEAD_DIM, IN_REGISTERS>;
};
