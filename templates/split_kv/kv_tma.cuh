// kv_tma.cuh: K and V of a warp by way of a ring of STAGES tiles in shared memory that the tensor copy engine fills,
// one lane asking for a whole tile (sm_90).
//
// By tensor maps, not plain bulk copies: rows that lie end to end in shared memory, as one bulk copy would put them,
// bring the lanes that read together to the same banks (two to one with K, four to one with V), and rows with padding
// between them are a request each, of 128 bytes or a few times that. A map swizzles, follows any stride of rows, and
// reads zeros past the last key, where garbage could be a NaN (0 · NaN = NaN). Keys past the end of a split are another
// split's, and masked. PAGED: a tile is a box of one page, and begins at a multiple of its keys.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"
#include "split_kv/lane_pieces.cuh"
#include "device/copy/ring_position.cuh"
#include "split_kv/warp_keys.cuh"

#define KV_SOURCE const __grid_constant__ TensorMap  // [batch, kv_heads, seqlen_k, HEAD_DIM], boxes of KEYS rows

template <typename Element, int HEAD_DIM, class Rows, int WARPS, int BLOCK_N, int STAGES, bool SEQUSED, Place PLACE>
struct KeyTiles {
  using Tiles = TensorTile<HEAD_DIM* int(sizeof(Element)) / 2>;  // maps are of 16-bit columns
  static constexpr int KEYS = BLOCK_N / WARPS, TILE_BYTES = Tiles::bytes(KEYS);
  static constexpr int RING_BYTES = WARPS * STAGES * 2 * TILE_BYTES;  // for each warp tiles of K, tiles of V
  static constexpr int BARRIER_BYTES = WARPS * STAGES * 2 * 8;  // for each warp "full" of tiles of K, of tiles of V
  static_assert(KEYS % 8 == 0, "tiles are whole periods of the swizzle");

  template <typename LoadQ, typename Scores>
  static __device__ __forceinline__ void visit(const WarpKeys& keys, const TensorMap& k_map, const TensorMap& v_map,
                                               int warp, unsigned char* rings_smem, unsigned char* barriers_smem,
                                               Rows& work, LoadQ load_q, Scores scores) {
    const bool asks = threadIdx.x % 32 == 0;
    const unsigned char* k_ring = rings_smem + warp * STAGES * 2 * TILE_BYTES;
    const unsigned char* v_ring = k_ring + STAGES * TILE_BYTES;
    const uint32_t k_full_smem = shared_address(barriers_smem) + warp * STAGES * 2 * 8,
                   v_full_smem = k_full_smem + STAGES * 8;
    auto copy = [&](const TensorMap& map, const unsigned char* ring, uint32_t full_smem, int tile, int stage) {
      if (asks && tile < keys.tiles) {
        if constexpr (PLACE == Place::PAGED) {
          const int key = keys.first + tile * BLOCK_N;
          Tiles::template load<KEYS>(shared_address(ring + stage * TILE_BYTES), map, full_smem + 8 * stage,
                                     keys.row_in_page(key), keys.kv_head, keys.page_of(key));
        } else {
          Tiles::template load<KEYS>(
              shared_address(ring + stage * TILE_BYTES), map, full_smem + 8 * stage,
              PLACE == Place::LISTED ? keys.listed_key(keys.first + tile * BLOCK_N) : keys.first + tile * BLOCK_N,
              keys.kv_head, keys.batch);
        }
      }
    };
    // The tile STAGES ahead into a place that all lanes have read.
    auto copy_again = [&](const TensorMap& map, const unsigned char* ring, uint32_t full_smem, int tile, int stage) {
      if (tile + STAGES >= keys.tiles) return;
      fence_proxy_async();  // this lane's reads come before what the engine writes
      __syncwarp();         // all lanes' reads do
      copy(map, ring, full_smem, tile + STAGES, stage);
      __syncwarp();  // the lane that asked is back: mma wants whole warps
    };
    if (asks) {
      prefetch_tensor_map(k_map);
      prefetch_tensor_map(v_map);
#pragma unroll
      for (int i = 0; i < 2 * STAGES; ++i) mbarrier_init(k_full_smem + 8 * i, 1);
      mbarrier_init_fence();
    }
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      copy(k_map, k_ring, k_full_smem, i, i);
      copy(v_map, v_ring, v_full_smem, i, i);
    }
    __syncwarp();  // the other lanes may wait at the barriers, which are made
    load_q();
    RingPosition<STAGES> at;
    for (int tile = 0; tile < keys.tiles; ++tile) {
      typename Rows::K k;
      mbarrier_wait(k_full_smem + 8 * at.stage, at.parity);
      k.template read_tile<KEYS>(k_ring + at.stage * TILE_BYTES, work.k_row(), work.k_column());
      scores(k, tile);
      copy_again(k_map, k_ring, k_full_smem, tile, at.stage);
      typename Rows::V v;
      mbarrier_wait(v_full_smem + 8 * at.stage, at.parity);
      v.template read_tile<KEYS>(v_ring + at.stage * TILE_BYTES, work.v_row(), work.v_column());
      if constexpr (SEQUSED) {
        const int left = keys.count - tile * BLOCK_N;
        if (left < KEYS) v.clear_tile_from(left, work.v_row());  // their weight is 0, but 0 · NaN = NaN
      }
      work.accumulate(v);
      copy_again(v_map, v_ring, v_full_smem, tile, at.stage);
      at.advance();
    }
  }
};
