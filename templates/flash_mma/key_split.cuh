// key_split.cuh: blocks take different keys of the same rows. Each leaves its result in global memory; the last one to
// arrive at a counter adds up all, always in the same order, so that a row has the same bits whichever block is the
// last.
#include "device/copy/flash_output.cuh"
#include "device/merge/last_block.cuh"
#include "device/mma/flash_fragments.cuh"

template <int KEY_SPLIT, int WARPS, int KEY_WARPS, int ROW_TILES, int DIM_TILES> struct SplitResults {
  static constexpr int WARP_VECTORS = merge_floats(ROW_TILES, DIM_TILES) / 4 * 32;
  float4* results_gmem;      // [tiles of rows, KEY_SPLIT, WARPS, pieces, 32 lanes]
  uint32_t* arrived_zeroed;  // [tiles of rows]

  // By all threads of the block, of which those of the first key warps hold the result of its part of the keys. Whether
  // this thread then holds that of all keys. `merge_smem` as of `merge_key_warps`; `ticket_smem` is a free word.
  __device__ __forceinline__ bool add_up(RowState<ROW_TILES, DIM_TILES>& state, int64_t tile, int part,
                                         unsigned char* merge_smem, unsigned char* ticket_smem, int row_warp,
                                         int key_warp, int lane) const {
    float4* lane_gmem = results_gmem + (tile * KEY_SPLIT * WARPS + row_warp) * WARP_VECTORS + lane;
    if (key_warp == 0) leave_result(state, lane_gmem + part * WARPS * WARP_VECTORS);
    if (!is_last_block(arrived_zeroed + tile, KEY_SPLIT, reinterpret_cast<uint32_t*>(ticket_smem))) return false;
    state.clear();
    // The key warps take the parts in turn.
#pragma unroll 2
    for (int i = key_warp; i < KEY_SPLIT; i += KEY_WARPS) {
      const float4* part_gmem = lane_gmem + i * WARPS * WARP_VECTORS;
      add_result(state, [&](int piece) { return __ldcg(part_gmem + piece * 32); });  // not what L1 had before
    }
    if constexpr (KEY_WARPS > 1)
      merge_key_warps<WARPS, KEY_WARPS>(state, reinterpret_cast<float4*>(merge_smem), row_warp, key_warp, lane);
    return key_warp == 0;
  }
};
