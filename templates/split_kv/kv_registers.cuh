// kv_registers.cuh: K and V of a warp from global memory to registers, one tile ahead.
#include "split_kv/lane_pieces.cuh"
#include "split_kv/warp_keys.cuh"

#define KV_SOURCE const KvElement* __restrict__  // [batch, kv_heads, seqlen_k, HEAD_DIM]

template <typename Element, int HEAD_DIM, class Rows, int WARPS, int BLOCK_N, int STAGES, bool SEQUSED, Place PLACE>
struct KeyTiles {
  static constexpr int RING_BYTES = 0, BARRIER_BYTES = 0;

  template <typename LoadQ, typename Scores>
  static __device__ __forceinline__ void visit(const WarpKeys& keys, const Element* k_gmem, const Element* v_gmem, int,
                                               unsigned char*, unsigned char*, Rows& work, LoadQ load_q,
                                               Scores scores) {
    LaneRows<Element, PLACE> k_rows(k_gmem, keys, keys.k_strides, work.k_row(), work.k_column());
    LaneRows<Element, PLACE> v_rows(v_gmem, keys, keys.v_strides, work.v_row(), work.v_column());
    TilePages<PLACE, BLOCK_N / WARPS> pages;  // of the tile that is loaded next
    auto find_pages = [&](int tile) {
      if (tile < keys.tiles) pages.load(keys, keys.first + tile * BLOCK_N, work.k_row());
    };
    const int k_columns = HEAD_DIM - work.k_column(), v_columns = HEAD_DIM - work.v_column();
    typename Rows::K k;
    typename Rows::V v;
    int keys_left = keys.count;  // from the next tile to be loaded on
    auto load_k = [&] {
      k.load([&](int offset) { return k_rows.at(offset, keys, pages); }, pages.left(keys, keys_left) - work.k_row(),
             k_columns);
      k_rows.next_tile(BLOCK_N);
    };
    auto load_v = [&] {
      v.load([&](int offset) { return v_rows.at(offset, keys, pages); }, pages.left(keys, keys_left) - work.v_row(),
             v_columns);
      v_rows.next_tile(BLOCK_N);
      keys_left -= BLOCK_N;
    };
    find_pages(0);
    load_k();
    load_q();
    load_v();
    find_pages(1);
    for (int tile = 0; tile < keys.tiles; ++tile) {
      scores(k, tile);
      if (tile + 1 < keys.tiles) load_k();
      work.accumulate(v);
      if (tile + 1 < keys.tiles) load_v();
      find_pages(tile + 2);
    }
  }
};
