// producer.cuh: the warps that bring tiles of Q, K and V into shared memory. One thread issues every copy; of pages,
// which may be many small ones, each warp of a warpgroup a part, half of them of K, the others of V, if all know the
// tiles. Needs the constants of flash_wgmma.cu.j2.
#include "device/ptx/cluster.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/key_pages.cuh"
#include "device/copy/tile_ring.cuh"
#include "flash_wgmma/tile_scheduler.cuh"

struct Producer : TileFinder {
  static constexpr int PARTS =
      PAGED && SCHEDULE != Schedule::CLAIMED && Operands::TRANSPOSERS == 0 ? PRODUCER_WARPS : 1;
  static constexpr int OF_RING = PARTS > 1 ? PARTS / 2 : 1;  // of them those that copy K, or V
  const TensorMap &q_map, &k_map, &v_map;
  const Scales& scales;
  int part;

  __device__ __forceinline__ Producer(TileScheduler& work, const TensorMap& q_map, const TensorMap& k_map,
                                      const TensorMap& v_map, uint32_t* counters_zeroed, const Scales& scales)
      : TileFinder(work, counters_zeroed), q_map(q_map), k_map(k_map), v_map(v_map), scales(scales) {
    part = PARTS == 1 ? 0 : warp - 4 * WARPGROUPS;
  }

  __device__ __forceinline__ void run() {
    if (warp == 4 * WARPGROUPS && lane == 0) {
      prefetch_tensor_map(q_map), prefetch_tensor_map(k_map), prefetch_tensor_map(v_map);
      Smem::init_barriers<OF_RING>(smem_address);
    }
    __syncwarp();
    // Others see the initialised barriers; who initialised them need not wait.
    const bool transposes = Operands::TRANSPOSERS > 0 && warp > 4 * WARPGROUPS;
    if (transposes || (PARTS > 1 && part > 0)) named_barrier_sync<THREADS>(BARRIERS_READY);
    else named_barrier_arrive<THREADS>(BARRIERS_READY);
    if constexpr (CLUSTER > 1) cluster_arrive();  // other blocks see them too
    if constexpr (SHARES_SEQUENCES) sequence_share.find(work, lane);
    if constexpr (IN_ORDER) {
      if (warp == 4 * WARPGROUPS && work.batch <= ORDERED_BATCHES) order_batches();
    }
    if constexpr (PRODUCER_REGISTERS > 0) decrease_registers<PRODUCER_REGISTERS>();
    if (transposes) Operands::template transpose<Smem>(static_cast<const Block&>(*this));
    else if ((PARTS > 1 || warp == 4 * WARPGROUPS) && lane == 0) copy();
    if constexpr (CLUSTER > 1) __syncwarp(), cluster_wait();
  }

private:
  __device__ __forceinline__ void copy() {
    const TileRing<typename Operands::LoadedKeys, BLOCK_N, STAGES> k_ring{k_map, smem_address + Smem::LOADED_KEYS,
                                                                          barrier(Smem::KEYS_LOADED_FULL, 0),
                                                                          barrier(Smem::KEYS_LOADED_EMPTY, 0)};
    const TileRing<ValueTiles, BLOCK_N, STAGES> v_ring{v_map, smem_address + Smem::LOADED,
                                                       barrier(Smem::LOADED_FULL, 0), barrier(Smem::LOADED_EMPTY, 0)};
    start();
    Ring ring;  // of both: each tile of K goes before its V
    for (int round = 0; take_tile(round); ++round) {
      load_q(round);
      load_keys(k_ring, v_ring, ring);
      if constexpr (!PERSISTENT) break;
      move_on(round);
    }
    if constexpr (Operands::TRANSPOSERS > 0) {  // no V comes any more, and no K that CONVERTS
      constexpr bool KEYS = Operands::CONVERTS;
      mbarrier_wait(barrier(KEYS ? Smem::KEYS_LOADED_EMPTY : Smem::LOADED_EMPTY, ring.stage), ring.parity ^ 1);
      write_shared_word(smem_address + Smem::LAST + 4 * ring.stage, 1);
      mbarrier_arrive(barrier(KEYS ? Smem::KEYS_LOADED_FULL : Smem::LOADED_FULL, ring.stage));
    }
  }

  // The next tile of rows; false if none is left, of which the consumers hear as if Q had come.
  __device__ __forceinline__ bool take_tile(int round) {
    return next(round, part == 0, [&] {
      for (int i = 0; i < WARPGROUPS && part == 0; ++i) {
        wait_for_q_place(i, round), mbarrier_arrive(barrier(Smem::Q_FULL, i));
      }
    });
  }
  // A warpgroup has read its last Q.
  __device__ __forceinline__ void wait_for_q_place(int i, int round) const {
    if constexpr (PERSISTENT) mbarrier_wait(barrier(Smem::Q_EMPTY, i), round % 2 ^ 1);
  }
  __device__ __forceinline__ void load_q(int round) const {
    for (int i = 0; i < WARPGROUPS && part == 0; ++i) {
      wait_for_q_place(i, round);
      const int row = work.tile.row_block * BLOCK_M + i * 64;
      const uint32_t place = smem_address + i * Smem::Q_PLACE_BYTES, full = barrier(Smem::Q_FULL, i);
      if constexpr (VARLEN && GROUP_ROWS) {
        work.rows.load<QueryTiles>(place, q_map, full, row, work.tile, work.sequence.first_query);
      } else if constexpr (VARLEN) {
        QueryTiles::load_sliding<64>(place, q_map, full, row, work.sequence.queries, work.sequence.end_query(),
                                     work.tile.head);
      } else {
        work.rows.load<QueryTiles>(place, q_map, full, row, work.tile);
      }
    }
  }
  template <class KRing, class VRing>
  __device__ __forceinline__ void load_keys(const KRing& k_ring, const VRing& v_ring, Ring& ring) const {
    const int kv_head = work.kv_head(work.tile);
    const int last = work.last_key_tile(), first = work.first_key_tile();
    const KeyPages pages{work.terms.given.table + work.tile.batch * int64_t(work.terms.given.table_pages),
                         work.terms.given.page_bits, work.terms.given.kv_rows, work.seqlen_k};
    auto key_of = [&](int key_tile) {
      return KeyList::LISTED ? work.listed().first_key_down(key_tile) : key_tile * BLOCK_N;
    };
    const bool keys = PARTS == 1 || part < OF_RING, values = PARTS == 1 || !keys;
    const int own = keys ? part : part - OF_RING, end = work.sequence.end_key(), batch = work.tile.batch;
    typename Scales::Ahead ahead;
    ahead.begin_rows(scales, batch, kv_head, key_of(last));
    FirstPages next;
    if (PAGED && last >= first) next = KRing::template first_pages<OF_RING>(pages, key_of(last), own);
    for (int key_tile = last; key_tile >= first; key_tile = work.tile_before(key_tile)) {
      const int key = key_of(key_tile);
      if constexpr (Scales::BY_BLOCK) {
        mbarrier_wait(barrier(Smem::K_EMPTY, ring.stage), ring.parity ^ 1);  // what was told there has been read
        ahead.tell(scales, smem_address + Smem::TOLD + Smem::TOLD_BYTES * ring.stage, key - BLOCK_N);
      }
      auto load = [&](const auto& of) {
        if constexpr (PAGED) of.template load_paged<OF_RING>(ring, pages, key, kv_head, next, own);
        else of.template load_keys<false, SLIDING>(ring, key, pages, end, kv_head, batch);
      };
      if (keys) load(k_ring);
      if (values) load(v_ring);
      if constexpr (PAGED) {  // beside the wait for a place
        const int before = work.tile_before(key_tile);
        if (before >= first) next = KRing::template first_pages<OF_RING>(pages, key_of(before), own);
      }
      ring.advance();
    }
  }
};
