// latent_ring.cuh: the producer's side of a ring of tiles of K whose first columns are V: of one tensor, or APART of V
// and of a tensor with the columns behind it.
#include "device/copy/tile_ring.cuh"

template <int HEAD_DIM, int VALUE_DIM, bool APART, int ROWS, int STAGES> struct LatentRing {
  static constexpr int STAGE_BYTES = TensorTile<HEAD_DIM>::bytes(ROWS);
  static constexpr int VALUE_BYTES = APART ? TensorTile<VALUE_DIM>::bytes(ROWS) : 0;  // in front of K's own columns
  TileRing<TensorTile<APART ? HEAD_DIM - VALUE_DIM : HEAD_DIM>, ROWS, STAGES, STAGE_BYTES> k_ring;
  TileRing<TensorTile<VALUE_DIM>, ROWS, STAGES, STAGE_BYTES> v_ring;

  __device__ __forceinline__ LatentRing(const TensorMap& k_map, const TensorMap& v_map, uint32_t tiles_smem,
                                        uint32_t full_smem, uint32_t empty_smem)
      : k_ring{k_map, tiles_smem + VALUE_BYTES, full_smem, empty_smem},
        v_ring{v_map, tiles_smem, full_smem, empty_smem} {}

  // As of `TileRing`.
  template <bool PAGED, bool SLIDING>
  __device__ __forceinline__ void load_keys(const RingPosition<STAGES>& at, int key, const KeyPages& pages, int end,
                                            int head, int batch) const {
    if constexpr (APART) v_ring.template load_keys<PAGED, SLIDING>(at, key, pages, end, head, batch);
    k_ring.template load_keys<PAGED, SLIDING>(at, key, pages, end, head, batch);
  }
};
