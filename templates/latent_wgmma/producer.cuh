// producer.cuh: the thread that brings Q and tiles of K into shared memory. Needs the constants of latent_wgmma.cu.j2.
#include "device/copy/latent_ring.cuh"
#include "latent_wgmma/work.cuh"

__device__ __forceinline__ void copy_tiles(const Work& work, const TensorMap& q_map, const TensorMap& k_map,
                                           const TensorMap& v_map) {
  Tiles::load<64>(work.smem_address, q_map, work.smem_address + Smem::Q_FULL, work.first_head, work.query, work.batch);
  const LatentRing<HEAD_DIM, VALUE_DIM, APART, BLOCK_N, STAGES> k_ring(
      k_map, v_map, work.smem_address + Smem::K, work.smem_address + Smem::K_FULL, work.smem_address + Smem::K_EMPTY);
  const auto& given = work.terms.given;
  const KeyPages pages{given.table + work.batch * int64_t(given.table_pages), given.page_bits, given.kv_rows,
                       work.seqlen_k};
  const int first_key = work.batch * given.kv_rows;
  Ring ring;
  for (int tile = work.last_tile; tile >= work.first_tile; --tile) {
    k_ring.load_keys<PAGED, SEQUSED>(ring, tile * BLOCK_N, pages, first_key + work.seqlen_k, work.kv_head, work.batch);
    ring.advance();
  }
}
