// rounded_rows.cuh: 64 rows of Q as wgmma's A operand of e4m3, where they do not come as they are multiplied. Each warp
// makes numbers of its 16 rows, with one scale that it gives back.
#include "device/ptx/e4m3.cuh"
#include "device/ptx/eight_bits.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/largest2.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/pairs.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/tensor_tile.cuh"
#include "flash_wgmma/given_rows.cuh"
#include "flash_wgmma/made_rows.cuh"

// PAIRS: sums of products are in fp16, so that no row's magnitudes may add up to more than it holds beside the largest
// number of K: how much less numbers have to be, a power of two, so that they are rounded alike. `sums` of magnitudes
// of a lane's rows g and g + 8; of numbers that are multiplied by `inverse`. `most` is what a row is taken to add up to
// at least. Sums of bf16 may be some 12 % too small at 256 columns, and e4m3 rounds up by 6 % at most: hence 0.82.
constexpr float ROOM = 0.82f * 65504.f / 448.f;
template <class Wide>
__device__ __forceinline__ float room_for_pairs(const uint32_t (&sums)[2], float inverse, float most = ROOM) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float low, high;
    unpack2(sums[row], Wide{}, low, high);
    float sum = (low + high) * (SUMMED_SIZE<Wide> * inverse);
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    most = fmaxf(most, sum + __shfl_xor_sync(ALL_LANES, sum, 2));
  }
  most = __uint_as_float(warp_max(__float_as_uint(most))) * (1.f / ROOM);
  return __uint_as_float((__float_as_uint(most) + 0x7fffff) & 0x7f800000);  // the least power that is no less
}
__device__ __forceinline__ float inverse_of_power(float x) { return __uint_as_float(0x7f000000 - __float_as_uint(x)); }

// Numbers that come in 8 bits, less by a power of two, which `round` gives back.
template <int HEAD_DIM, bool IN_REGISTERS> struct LoweredRows : MadeRows<HEAD_DIM, IN_REGISTERS> {
  using MadeRows<HEAD_DIM, IN_REGISTERS>::STEPS;
  template <typename Meet>
  __device__ __forceinline__ float round(unsigned char* tile, uint32_t tile_smem, int thread, Meet meet) {
    forget_origin(thread);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    typename MadeRows<HEAD_DIM, IN_REGISTERS>::Own own;
    auto& made = this->registers(own);
    uint32_t sums[2] = {}, low, high;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      RowOperand<HEAD_DIM / 2, false>::fragment(made[step], step, tile_smem, thread / 32, lane);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        to_halves<E4m3>(made[step][part], low, high);
        sums[part % 2] = add_sizes(add_sizes(sums[part % 2], low, Fp16{}), high, Fp16{});
      }
    }
    const float more = room_for_pairs<Fp16>(sums, 1.f), less = inverse_of_power(more);
    const uint32_t both = pack2<Fp16>(less, less);
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
      to_halves<E4m3>(made[i / 4][i % 4], low, high);
      made[i / 4][i % 4] = pack4_e4m3(multiply_add(low, both, 0), multiply_add(high, both, 0));
    }
    this->keep(own, tile, tile_smem, row, lane, meet);
    return more;
  }
};

// Numbers that come in 16 bits: the scale takes the largest of them to the end of the range, or with PAIRS less far, so
// that Q is read once and no launch comes before.
template <class Wide, int HEAD_DIM, bool IN_REGISTERS, bool PAIRS>
struct RoundedRows : MadeRows<HEAD_DIM, IN_REGISTERS> {
  using MadeRows<HEAD_DIM, IN_REGISTERS>::STEPS;
  static constexpr float LARGEST = 448.f, LEAST_SCALE = 1.17549435e-38f;

  // Of `tile`, at `tile_smem`, whose columns past HEAD_DIM read zero; returns the scale. Without IN_REGISTERS
  // numbers take the place of what they are made of, row by row; `meet` lets all warps of the warpgroup meet.
  template <typename Meet>
  __device__ __forceinline__ float round(unsigned char* tile, uint32_t tile_smem, int thread, Meet meet) {
    forget_origin(thread);  // or addresses would be kept in registers from tile to tile
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    GivenRows<Wide, STEPS> given;
    given.load(tile, row, lane);
    const float size = given.size();
    float scale = size > 0.f ? fmaxf(size / LARGEST, LEAST_SCALE) : 1.f, inverse = 1.f / scale;
    if constexpr (PAIRS) {
      uint32_t sums[2] = {};
#pragma unroll
      for (int i = 0; i < 8 * STEPS; ++i)
        sums[i / 2 % 2] = add_sizes(sums[i / 2 % 2], given.parts[i / 8][i / 2 % 4].at[i % 2], Wide{});
      // Sums of fp16 lose what is below 2^-17: of small numbers a row is taken to have the largest in all columns.
      const float more = room_for_pairs<Wide>(sums, inverse, size < LEAST_SUMMED<Wide> ? HEAD_DIM * LARGEST : ROOM);
      scale *= more, inverse *= inverse_of_power(more);
    }
    typename MadeRows<HEAD_DIM, IN_REGISTERS>::Own own;
    auto& made = this->registers(own);
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
      float x[4];
      given.four(i, x);
      made[i / 4][i % 4] = pack4_e4m3(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
    }
    this->keep(own, tile, tile_smem, row, lane, meet);
    return scale;
  }
};

// Rows that come as they are multiplied, or are made.
template <class Wide, int HEAD_DIM, bool IN_REGISTERS, bool ROUNDS, bool PAIRS> struct RowsOf {
  using Type = RowOperand<HEAD_DIM / 2, IN_REGISTERS>;
};
template <class Wide, int HEAD_DIM, bool IN_REGISTERS> struct RowsOf<Wide, HEAD_DIM, IN_REGISTERS, false, true> {
  using Type = LoweredRows<HEAD_DIM, IN_REGISTERS>;
};
template <class Wide, int HEAD_DIM, bool IN_REGISTERS, bool PAIRS>
struct RowsOf<Wide, HEAD_DIM, IN_REGISTERS, true, PAIRS> {
  using Type = RoundedRows<Wide, HEAD_DIM, IN_REGISTERS, PAIRS>;
};
