// kv_cp_async.cuh: K and V of a warp by way of a ring of STAGES tiles in shared memory, each lane copying what it will
// read itself.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/cp_async.cuh"
#include "split_kv/lane_pieces.cuh"
#include "split_kv/warp_keys.cuh"

#define KV_SOURCE const KvElement* __restrict__  // [batch, kv_heads, seqlen_k, HEAD_DIM]

template <typename Element, int HEAD_DIM, class Rows, int WARPS, int BLOCK_N, int STAGES, bool SEQUSED, Place PLACE>
struct KeyTiles {
  static constexpr int WARP_RING_BYTES = STAGES * (Rows::K::WARP_BYTES + Rows::V::WARP_BYTES);
  static constexpr int RING_BYTES = WARPS * WARP_RING_BYTES, BARRIER_BYTES = 0;

  template <typename LoadQ, typename Scores>
  static __device__ __forceinline__ void visit(const WarpKeys& keys, const Element* k_gmem, const Element* v_gmem,
                                               int warp, unsigned char* rings_smem, unsigned char*, Rows& work,
                                               LoadQ load_q, Scores scores) {
    LaneRows<Element, PLACE> k_rows(k_gmem, keys, keys.k_strides, work.k_row(), work.k_column());
    LaneRows<Element, PLACE> v_rows(v_gmem, keys, keys.v_strides, work.v_row(), work.v_column());
    TilePages<PLACE, BLOCK_N / WARPS> pages;  // of the tile that is copied next
    auto find_pages = [&](int tile) {
      if (tile < keys.tiles) pages.load(keys, keys.first + tile * BLOCK_N, work.k_row());
    };
    const int k_columns = HEAD_DIM - work.k_column(), v_columns = HEAD_DIM - work.v_column();
    // cp.async groups: K and V of tile 0, of tile 1, … Tiles past the last leave empty groups, which keep the count.
    const unsigned char* k_ring = rings_smem + warp * WARP_RING_BYTES + threadIdx.x % 32 * Rows::K::PIECE_BYTES;
    const unsigned char* v_ring = k_ring + STAGES * Rows::K::WARP_BYTES;
    const uint32_t k_ring_smem = shared_address(k_ring), v_ring_smem = shared_address(v_ring);
    auto copy_k = [&](int tile, int stage) {
      if (tile < keys.tiles) {
        Rows::K::copy(
            k_ring_smem + stage * Rows::K::WARP_BYTES, [&](int offset) { return k_rows.at(offset, keys, pages); },
            pages.left(keys, keys.count - tile * BLOCK_N) - work.k_row(), k_columns);
        k_rows.next_tile(BLOCK_N);
      }
      cp_async_commit();
    };
    auto copy_v = [&](int tile, int stage) {
      if (tile < keys.tiles) {
        Rows::V::copy(
            v_ring_smem + stage * Rows::V::WARP_BYTES, [&](int offset) { return v_rows.at(offset, keys, pages); },
            pages.left(keys, keys.count - tile * BLOCK_N) - work.v_row(), v_columns);
        v_rows.next_tile(BLOCK_N);
      }
      cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      find_pages(i);
      copy_k(i, i);
      copy_v(i, i);
    }
    find_pages(STAGES);
    load_q();
    int stage = 0;
    for (int tile = 0; tile < keys.tiles; ++tile) {
      typename Rows::K k;
      cp_async_wait<2 * STAGES - 1>();  // this lane's pieces of K are here: no other lane reads them
      k.read(k_ring + stage * Rows::K::WARP_BYTES);
      scores(k, tile);
      copy_k(tile + STAGES, stage);
      typename Rows::V v;
      cp_async_wait<2 * STAGES - 1>();
      v.read(v_ring + stage * Rows::V::WARP_BYTES);
      work.accumulate(v);
      copy_v(tile + STAGES, stage);
      find_pages(tile + STAGES + 1);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    cp_async_wait<0>();
  }
};
