// given_rows.cuh: 64 rows of Q of 16 bits in shared memory, as a lane makes wgmma's A operand of 8 bits of them.
#include "device/ptx/element.cuh"
#include "device/ptx/largest2.cuh"
#include "device/ptx/pairs.cuh"
#include "device/ptx/warp.cuh"
#include "device/copy/vector.cuh"

// The lane's elements: columns 32 · step + 16 · (part / 2) + 4 · (lane % 4) of rows `row` and `row` + 8 by turns.
template <class Wide, int STEPS> struct GivenRows {
  Vector<uint32_t, 2> parts[STEPS][4];

  // Of `tile`, whose columns past the last read zero.
  __device__ __forceinline__ void load(const unsigned char* tile, int row, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int piece = step * 4 + part / 2 * 2 + lane % 4 / 2;  // of eight columns
        const unsigned char* of_row = tile + (piece / 8 * 64 + row + part % 2 * 8) * 128;
        parts[step][part] =
            load_vector<2>(reinterpret_cast<const uint32_t*>(of_row + ((piece ^ row) & 7) * 16 + lane % 2 * 8));
      }
  }
  // The largest finite magnitude of all lanes of the warp; infinities count for no scale, and become NaN.
  __device__ __forceinline__ float size() {
    float rows[2];
    return size(rows);
  }
  // The same, and of rows g and g + 8.
  __device__ __forceinline__ float size(float (&rows)[2]) {
    const float most = largest(rows);
    if (is_finite(most)) return most;  // of all lanes
#pragma unroll
    for (int i = 0; i < 8 * STEPS; ++i) {
      uint32_t& pair = parts[i / 8][i / 2 % 4].at[i % 2];
      pair = without_infinities<Wide>(pair);
    }
    return largest(rows);
  }
  // Those of a part, counted over all steps.
  __device__ __forceinline__ void four(int part, float (&x)[4]) const {
    const auto& of = parts[part / 4][part % 4];
    unpack2(of.at[0], Wide{}, x[0], x[1]), unpack2(of.at[1], Wide{}, x[2], x[3]);
  }

private:
  // Floats from 0 on have the order of their bits.
  __device__ __forceinline__ float largest(float (&rows)[2]) const {
    uint32_t most[4] = {};
#pragma unroll
    for (int i = 0; i < 8 * STEPS; ++i) most[i % 4] = larger2(most[i % 4], parts[i / 8][i / 2 % 4].at[i % 2], Wide{});
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float low, high;
      unpack2(larger2(most[2 * row], most[2 * row + 1], Wide{}), Wide{}, low, high);
      rows[row] = fmaxf(low, high);
    }
    return __uint_as_float(warp_max(__float_as_uint(fmaxf(rows[0], rows[1]))));
  }
};
