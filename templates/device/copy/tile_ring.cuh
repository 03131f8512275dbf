// tile_ring.cuh: the producer's side of a ring of key or value tiles.
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/copy/ring_position.cuh"
#include "device/copy/key_pages.cuh"

// Pages of the first boxes of a tile that a thread copies: few, as a warp that gives its registers away has.
struct FirstPages {
  static constexpr int COUNT = 4;
  int entries[COUNT];

  // Of boxes from `row` on, `step` rows apart, of a tile of `rows` keys.
  __device__ __forceinline__ void look_up(const KeyPages& pages, int key, int row, int step, int rows) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) entries[i] = row + i * step < rows ? pages.entry_of(key + row + i * step) : 0;
  }
};

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
  static __device__ __forceinline__ int box_rows(const KeyPages& pages) {  // that divide the tile and a page
    return min(pages.page_keys(), ROWS & -ROWS);
  }
  template <int PARTS = 1>
  static __device__ __forceinline__ FirstPages first_pages(const KeyPages& pages, int key, int part = 0) {
    FirstPages first;
    first.look_up(pages, key, part * box_rows(pages), PARTS * box_rows(pages), ROWS);
    return first;
  }
  // The tile of a sequence in pages, from key `key` on, box by box. PARTS threads issue them in turn, each of which
  // arrives at "full" and has looked up its `first` pages.
  template <int PARTS = 1>
  __device__ __forceinline__ void load_paged(const RingPosition<STAGES>& at, const KeyPages& pages, int key, int head,
                                             FirstPages first, int part = 0) const {
    const int rows_of_box = box_rows(pages), step = PARTS * rows_of_box, box_bits = 31 - __clz(rows_of_box);
    const uint32_t tile_smem = tiles_smem + at.stage * STAGE_BYTES, barrier_smem = full_smem + 8 * at.stage;
    mbarrier_wait(empty_smem + 8 * at.stage, at.parity ^ 1);
    // Of boxes part, part + PARTS … there may be none.
    const int rows_of_part = PARTS == 1 ? ROWS : ((ROWS >> box_bits) + PARTS - 1 - part) / PARTS << box_bits;
    mbarrier_arrive_expect_tx(barrier_smem, Tiles::bytes(rows_of_part));
#pragma unroll 1
    for (int row = part * rows_of_box;;) {
#pragma unroll
      for (int i = 0; i < FirstPages::COUNT; ++i) {
        if (row >= ROWS) return;
        const KeyPages::Rows rows = pages.rows_from(key + row, first.entries[i]);
        Tiles::template load_sliding_box<ROWS>(tile_smem + row * 128, map, barrier_smem, rows.first, rows.length,
                                               rows.end, head);
        row += step;
      }
      first.look_up(pages, key, row, step, ROWS);
    }
  }
  // The same from key `key` of a sequence on, wherever its keys lie: in pages, in rows that end before row `end` of a
  // head, or in a batch.
  template <bool PAGED, bool SLIDING>
  __device__ __forceinline__ void load_keys(const RingPosition<STAGES>& at, int key, const KeyPages& pages, int end,
                                            int head, int batch) const {
    if constexpr (PAGED) load_paged(at, pages, key, head, first_pages(pages, key));
    else if constexpr (SLIDING) load_sliding(at, key, pages.keys, end, head);
    else load(at, key, head, batch);
  }
};
