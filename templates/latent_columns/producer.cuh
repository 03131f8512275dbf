// producer.cuh: the thread that brings Q and tiles of K into shared memory, and of a cache of 8 bits warps that bring
// scales. Needs the constants of latent_columns.cu.j2.
#include "device/copy/kv_scales.cuh"
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
    auto load_q = [&] {
      const uint32_t q_full = smem + Smem::Q_FULL + 8 * q_place.stage;
      mbarrier_wait(smem + Smem::Q_EMPTY + 8 * q_place.stage, q_place.parity ^ 1);
      mbarrier_arrive_expect_tx(q_full, Smem::Q_TILE_BYTES);
      tma_load_5d(smem + q_place.stage * Smem::Q_TILE_BYTES, q_map, q_full, 0, tile.first_head, tile.query, 0,
                  tile.batch);
      q_place.advance();
    };
    if constexpr (Q_STAGES > 1) load_q();
    for (int i = shares.end_tile - 1; i >= shares.first_tile; --i) {
#pragma unroll 1
      for (int key = i * BLOCK_N; key < (i + 1) * BLOCK_N; key += KEYS) {
        k_ring.load_keys<PAGED, SEQUSED>(k_place, key, pages, first_key + used, tile.kv_head, tile.batch);
        k_place.advance();
      }
      if (Q_STAGES == 1 && i == shares.end_tile - 1) load_q();  // keys come before its place is free
    }
  }
}

// Scales of V, four floats for each key that is loaded, 0 behind the last key in use, where anything may lie. Of
// SCALE_WARPS, each of which waits for what it has asked for, warp `first` has the same places of the ring always: one
// that left rounds out would take the end of a phase for that of the next but one. Each lane arrives for what it has
// written or read: compute-sanitizer's racecheck does not follow one lane's arrival for its warp.
constexpr int SCALE_WARPS = LOADED % 3 == 0 ? 3 : LOADED % 2 == 0 ? 2 : 1;
__device__ __forceinline__ void copy_scales(KeyShares& shares, const ScaleSource& source, int first) {
  constexpr int GROUPS = VALUE_DIM / SCALE_COLUMNS;
  const auto& given = shares.terms.given;
  RingPosition<LOADED> place;
  while (shares.next()) {
    const int batch = shares.tile.batch, used = shares.keys_of(batch);
    const KeyPages pages{given.table + batch * int64_t(given.table_pages), given.page_bits, given.kv_rows, used};
    const float* head_gmem = source.gmem + shares.tile.kv_head * source.head;
    for (int i = shares.end_tile - 1; i >= shares.first_tile; --i) {
#pragma unroll 1
      for (int part = 0; part < BLOCK_N; part += LOAD_KEYS, place.advance()) {
        if (place.stage % SCALE_WARPS != first || shares.lane >= LOAD_KEYS) continue;
        const int key = i * BLOCK_N + part + shares.lane;
        float scale[4] = {0.f, 0.f, 0.f, 0.f};
        if (key < used) {
          const float* key_gmem;
          if constexpr (PAGED)
            key_gmem = pages.page_of(head_gmem, key, source.batch) + pages.row_in_page(key) * source.row;
          else key_gmem = head_gmem + batch * source.batch + key * source.row;
#pragma unroll
          for (int group = 0; group < GROUPS; ++group) scale[group % 4] = __ldg(key_gmem + group);
        }
        mbarrier_wait(shares.barrier(Smem::LOADED_EMPTY, place.stage), place.parity ^ 1);
        reinterpret_cast<float4*>(shares.smem + Smem::SCALES)[place.stage * LOAD_KEYS + shares.lane] =
            make_float4(scale[0], scale[1], scale[2], scale[3]);
        mbarrier_arrive(shares.barrier(Smem::LOADED_FULL, place.stage));
      }
    }
  }
}
