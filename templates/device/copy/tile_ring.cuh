// tile_ring.cuh: the producer's side of a ring of key or value tiles.
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/copy/ring_position.cuh"
#include "device/copy/key_pages.cuh"

template <class Tiles, int ROWS, int STAGES, int STAGE_BYTES = Tiles::bytes(ROWS)> struct TileRing {
  const TensorMap& map;                        // boxes of ROWS rows
  uint32_t tiles_smem, full_smem, empty_smem;  // [STAGES] tiles, barriers "full", barriers "empty"

  // The tile from `row` on into place `at`, once all consumers are done with what was there.
  __device__ __forceinline__ void load(const RingPosition<STAGES>& at, int row, int head, int batch) const {
    mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);
    Tiles::template load<ROWS>(tiles_smem + at.stage * STAGE_BYTES, map, full_smem + 8 * at.stage, row, head, batch);
  }
  // The same of a sequence that is packed, or of which only some keys are in use.
  __device__ __forceinline__ void load_sliding(const RingPosition<STAGES>& at, int row, int length, int end,
                                               int head) const {
    mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);
    Tiles::template load_sliding<ROWS>(tiles_smem + at.stage * STAGE_BYTES, map, full_smem + 8 * at.stage, row, length,
                                       end, head);
  }
  // The same of a sequence in pages, from key `key` on: boxes of as many rows as divide the tile and a page. PARTS
  // threads issue them in turn, each of which arrives at "full".
  template <int PARTS = 1>
  __device__ __forceinline__ void load_paged(const RingPosition<STAGES>& at, const KeyPages& pages, int key, int head,
                                             int part = 0) const {
    constexpr int DIVIDES_TILE = ROWS & -ROWS;
    constexpr int BATCH = 4;  // pages that are looked up at once: a warp that gives its registers away has few
    const int box_rows = min(pages.page_keys(), DIVIDES_TILE), step = PARTS * box_rows;
    const int box_bits = 31 - __clz(box_rows);
    const uint32_t tile_smem = tiles_smem + at.stage * STAGE_BYTES, barrier_smem = full_smem + 8 * at.stage;
    int entries[BATCH];
    auto look_up = [&](int row) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) entries[i] = row + i * step < ROWS ? pages.entry_of(key + row + i * step) : 0;
    };
    const int first_row = part * box_rows;
    look_up(first_row);  // beside the wait
    mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);
    // Of boxes part, part + PARTS … there may be none.
    const int rows_of_part = PARTS == 1 ? ROWS : ((ROWS >> box_bits) + PARTS - 1 - part) / PARTS << box_bits;
    mbarrier_arrive_expect_tx(barrier_smem, Tiles::bytes(rows_of_part));
#pragma unroll 1
    for (int row = first_row;;) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (row >= ROWS) return;
        const KeyPages::Rows rows = pages.rows_from(key + row, entries[i]);
        Tiles::template load_sliding_box<ROWS>(tile_smem + row * 128, map, barrier_smem, rows.first, rows.length,
                                               rows.end, head);
        row += step;
      }
      look_up(row);
    }
  }
  // The same from key `key` of a sequence on, wherever its keys lie: in pages, in rows that end before row `end` of a
  // head, or in a batch.
  template <bool PAGED, bool SLIDING, int PARTS = 1>
  __device__ __forceinline__ void load_keys(const RingPosition<STAGES>& at, int key, const KeyPages& pages, int end,
                                            int head, int batch, int part = 0) const {
    if constexpr (PAGED) load_paged<PARTS>(at, pages, key, head, part);
    else if constexpr (SLIDING) load_sliding(at, key, pages.keys, end, head);
    else load(at, key, head, batch);
  }
};
