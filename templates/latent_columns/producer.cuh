// producer.cuh: the thread that brings Q and tiles of K into shared memory. Needs the constants of
// latent_columns.cu.j2.
#include "device/copy/latent_ring.cuh"
#include "latent_columns/key_shares.cuh"

__device__ __forceinline__ void copy_tiles(KeyShares& shares, const TensorMap& q_map, const TensorMap& k_map,
                                           const TensorMap& v_map) {
  const uint32_t smem = shares.smem_address;
  constexpr int PLACES = EIGHT_BITS ? LOADED : STAGES, KEYS = EIGHT_BITS ? LOAD_KEYS : BLOCK_N;
  constexpr int COLUMNS = EIGHT_BITS ? VALUE_DIM / 2 : VALUE_DIM;  // of V, of 16 bits
  const LatentRing<HEAD_DIM - VALUE_DIM + COLUMNS, COLUMNS, APART, KEYS, PLACES> k_ring(
      k_map, v_map, smem + (EIGHT_BITS ? Smem::LOADED_TILES : Smem::K),
      smem + (EIGHT_BITS ? Smem::LOADED_FULL : Smem::K_FULL), smem + (EIGHT_BITS ? Smem::LOADED_EMPTY : Smem::K_EMPTY));
  const auto& given = shares.terms.given;
  RingPosition<Q_STAGES> q_place;
  RingPosition<PLACES> k_place;
  while (shares.next()) {
    const RowTile& tile = shares.tile;
    const int used = shares.keys_of(tile.batch), first_key = tile.batch * given.kv_rows;
    const KeyPages pages{given.table + tile.batch * int64_t(given.table_pages), given.page_bits, given.kv_rows, used};
    const uint32_t q_full = smem + Smem::Q_FULL + 8 * q_place.stage;
    mbarrier_wait(smem + Smem::Q_EMPTY + 8 * q_place.stage, q_place.parity ^ 1);
    mbarrier_arrive_expect_tx(q_full, Smem::Q_TILE_BYTES);
    tma_load_5d(smem + q_place.stage * Smem::Q_TILE_BYTES, q_map, q_full, 0, tile.first_head, tile.query, 0,
                tile.batch);
    q_place.advance();
    for (int i = shares.end_tile - 1; i >= shares.first_tile; --i) {
#pragma unroll 1
      for (int key = i * BLOCK_N; key < (i + 1) * BLOCK_N; key += KEYS) {
        k_ring.load_keys<PAGED, SEQUSED>(k_place, key, pages, first_key + used, tile.kv_head, tile.batch);
        k_place.advance();
      }
    }
  }
}
