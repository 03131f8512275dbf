// tile_ring.cuh: the producer's side of a ring of key or value tiles.
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/copy/ring_position.cuh"

template <class Tiles, int ROWS, int STAGES> struct TileRing {
  const TensorMap& map;                        // boxes of ROWS rows
  uint32_t tiles_smem, full_smem, empty_smem;  // [STAGES] tiles, barriers "full", barriers "empty"

  // The tile from `row` on into place `at`, once all consumers are done with what was there.
  __device__ __forceinline__ void load(const RingPosition<STAGES>& at, int row, int head, int batch) const {
    mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);
    Tiles::template load<ROWS>(tiles_smem + at.stage * Tiles::bytes(ROWS), map, full_smem + 8 * at.stage, row, head,
                               batch);
  }
  // The same of a packed sequence.
  __device__ __forceinline__ void load_sliding(const RingPosition<STAGES>& at, int row, int length, int end,
                                               int head) const {
    mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);
    Tiles::template load_sliding<ROWS>(tiles_smem + at.stage * Tiles::bytes(ROWS), map, full_smem + 8 * at.stage, row,
                                       length, end, head);
  }
};
