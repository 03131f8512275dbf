// key_split.cuh: blocks take different keys of the same rows. Each leaves its result in global memory; the last one to
// arrive at a counter adds up all, part by part, so that a row has the same bits whichever block is the last.
#include "device/copy/flash_output.cuh"
#include "device/merge/last_block.cuh"
#include "device/mma/flash_fragments.cuh"

template <int KEY_SPLIT, int WARPS, int ROW_TILES, int DIM_TILES> struct SplitResults {
  float4* results_gmem;      // [tiles of rows, KEY_SPLIT, WARPS, pieces, 32 lanes]
  uint32_t* arrived_zeroed;  // [tiles of rows]

  // By all threads of the block, of which those that are `first` hold the result of its part of the keys. Whether this
  // thread then holds that of all keys. `ticket_smem` is a free word.
  __device__ __forceinline__ bool add_up(RowState<ROW_TILES, DIM_TILES>& state, int64_t tile, int part, int row_warp,
                                         bool first, unsigned char* ticket_smem, int lane) const {
    constexpr int WARP_VECTORS = merge_floats(ROW_TILES, DIM_TILES) / 4 * 32;
    float4* lane_gmem = results_gmem + (tile * KEY_SPLIT * WARPS + row_warp) * WARP_VECTORS + lane;
    if (first) leave_result(state, lane_gmem + part * WARPS * WARP_VECTORS);
    if (!is_last_block(arrived_zeroed + tile, KEY_SPLIT, reinterpret_cast<uint32_t*>(ticket_smem)) || !first)
      return false;
    state.clear();
#pragma unroll 1
    for (int i = 0; i < KEY_SPLIT; ++i, lane_gmem += WARPS * WARP_VECTORS)
      add_result(state, [&](int piece) { return __ldcg(lane_gmem + piece * 32); });  // not what L1 had before
    return true;
  }
};
