// producer.cuh: the thread that brings Q and tiles of K into shared memory. Needs the constants of
// latent_columns.cu.j2.
#include "device/copy/tile_ring.cuh"
#include "latent_columns/key_shares.cuh"

__device__ __forceinline__ void copy_tiles(KeyShares& shares, const TensorMap& q_map, const TensorMap& k_map) {
  const uint32_t smem = shares.smem_address;
  const TileRing<Tiles, BLOCK_M, Q_STAGES> q_ring{q_map, smem, smem + Smem::Q_FULL, smem + Smem::Q_EMPTY};
  const TileRing<Tiles, BLOCK_N, STAGES> k_ring{k_map, smem + Smem::K, smem + Smem::K_FULL, smem + Smem::K_EMPTY};
  const auto& given = shares.terms.given;
  RingPosition<Q_STAGES> q_place;
  RingPosition<STAGES> k_place;
  while (shares.next()) {
    const RowTile& tile = shares.tile;
    const int used = shares.keys_of(tile.batch), first_key = tile.batch * given.kv_rows;
    const KeyPages pages{given.table + tile.batch * int64_t(given.table_pages), given.page_bits, given.kv_rows, used};
    q_ring.load(q_place, tile.first_head, tile.query, tile.batch);
    q_place.advance();
    for (int i = shares.end_tile - 1; i >= shares.first_tile; --i) {
      k_ring.load_keys<PAGED, SEQUSED>(k_place, i * BLOCK_N, pages, first_key + used, tile.kv_head, tile.batch);
      k_place.advance();
    }
  }
}
