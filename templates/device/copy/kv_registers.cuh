// kv_registers.cuh: K and V of a warp from global memory to registers, one tile ahead.
#include "device/copy/lane_pieces.cuh"
#include "device/copy/warp_keys.cuh"

#define KV_SOURCE const Element* __restrict__  // [batch, kv_heads, seqlen_k, HEAD_DIM]

template <typename Element, int HEAD_DIM, class Rows, int WARPS, int BLOCK_N, int STAGES> struct KeyTiles {
  static constexpr int RING_BYTES = 0, BARRIER_BYTES = 0;

  template <typename LoadQ, typename Scores>
  static __device__ __forceinline__ void visit(const WarpKeys& keys, const Element* k_gmem, const Element* v_gmem, int,
                                               unsigned char*, unsigned char*, Rows& work, LoadQ load_q,
                                               Scores scores) {
    const Element* k_next_gmem = keys.place(k_gmem, keys.k_strides, work.k_row(), work.k_column());
    const Element* v_next_gmem = keys.place(v_gmem, keys.v_strides, work.v_row(), work.v_column());
    const int k_columns = HEAD_DIM - work.k_column(), v_columns = HEAD_DIM - work.v_column();
    typename Rows::K k;
    typename Rows::V v;
    int keys_left = keys.count;  // from the next tile to be loaded on
    auto load_k = [&] {
      k.load(k_next_gmem, keys.k_strides.row, keys_left - work.k_row(), k_columns);
      k_next_gmem += BLOCK_N * keys.k_strides.row;
    };
    auto load_v = [&] {
      v.load(v_next_gmem, keys.v_strides.row, keys_left - work.v_row(), v_columns);
      v_next_gmem += BLOCK_N * keys.v_strides.row;
      keys_left -= BLOCK_N;
    };
    load_k();
    load_q();
    load_v();
    for (int tile = 0; tile < keys.tiles; ++tile) {
      scores(k, tile);
      if (tile + 1 < keys.tiles) load_k();
      work.accumulate(v);
      if (tile + 1 < keys.tiles) load_v();
    }
  }
};
