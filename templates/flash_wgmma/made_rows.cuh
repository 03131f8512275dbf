// made_rows.cuh: 64 rows of Q as wgmma's A operand that do not come as they are multiplied.
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"

// A row operand's registers `made` in shared memory, where they are read from there.
template <int HEAD_DIM, bool IN_REGISTERS> struct MadeRows : RowOperand<HEAD_DIM / 2, IN_REGISTERS> {
  static constexpr int STEPS = TensorTile<HEAD_DIM / 2>::DIM_STEPS;  // of 32 columns
  using Own = uint32_t[IN_REGISTERS ? 1 : STEPS][4];
  __device__ __forceinline__ auto& registers(Own& own) {
    if constexpr (IN_REGISTERS) return this->frag;
    else return own;
  }
  template <typename Meet>
  __device__ __forceinline__ void keep(const Own& made, unsigned char* tile, uint32_t tile_smem, int row, int lane,
                                       Meet meet) {
    if constexpr (IN_REGISTERS) return;
    __syncwarp();  // all lanes have read the rows that numbers are written over
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
      const int step = i / 4, part = i % 4, place = (step % 4 * 2 + part / 2) ^ (row % 8);
      *reinterpret_cast<uint32_t*>(tile + (step / 4 * 64 + row + part % 2 * 8) * 128 + place * 16 + lane % 4 * 4) =
          made[IN_REGISTERS ? 0 : step][part];
    }
    fence_proxy_async();  // products see what was written
    meet();
    this->load(tile_smem, 0, lane);
  }
};
