// producer.cuh: the thread that brings Q and tiles of K into shared memory. Needs the constants of latent_wgmma.cu.j2.
#include "device/copy/latent_ring.cuh"
#include "latent_wgmma/work.cuh"

__device__ __forceinline__ void copy_tiles(const Work& work, const TensorMap& q_map, const TensorMap& k_map,
                                           const TensorMap& v_map) {
  const Tile& tile = work.tile;
  Tiles::load<64>(work.smem_address, q_map, work.barrier(Smem::Q_FULL, 0),
                  tile.head * work.group_heads + work.first_head, work.query, tile.batch);
  const LatentRing<HEAD_DIM, VALUE_DIM, APART, BLOCK_N, STAGES> k_ring(
      k_map, v_map, work.smem_address + Smem::K, work.barrier(Smem::K_FULL, 0), work.barrier(Smem::K_EMPTY, 0));
  const auto& given = work.terms.given;
  const KeyPages pages{given.table + tile.batch * int64_t(given.table_pages), given.page_bits, given.kv_rows,
                       work.seqlen_k};
  const int end = tile.batch * given.kv_rows + work.seqlen_k;
  Ring ring;
  for (int i = work.last_key_tile(), first = work.first_key_tile(); i >= first; --i, ring.advance())
    k_ring.load_keys<PAGED, SEQUSED>(ring, i * BLOCK_N, pages, end, tile.head, tile.batch);
}
