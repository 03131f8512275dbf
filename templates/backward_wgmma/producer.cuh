// producer.cuh: the warps of backward_wgmma beside the consumers. One brings tiles into shared memory: K and V once, Q
// and dO with their terms for each tile of queries. DQ_BY_WARP, one adds what consumers leave of dQ to its sums. Of
// both, one thread issues every copy. Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/bulk.cuh"
#include "device/ptx/flags.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/ring_position.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/schedule/sequences.cuh"
#include "backward_wgmma/query_sums.cuh"
#include "backward_wgmma/key_work.cuh"
#include "backward_wgmma/query_walk.cuh"
#include "backward_wgmma/shared_layout.cuh"

// The terms of the queries, which `row_terms.cuh` made: [batch, heads, tiles or slots, BLOCK_M] each.
struct QueryTerms {
  const float *log_sums_gmem, *deltas_gmem;
  int heads, tiles;

  __device__ __forceinline__ int64_t tile(const KeyWork& work, int head, int tile) const {
    return (int64_t(work.block.batch) * heads + head) * tiles + work.first_slot + tile;
  }
};

// CLAIMED: takes the tile of keys that the producer tells, once its K has come; false if there is none. `parity`: of
// how many were before it.
__device__ __forceinline__ bool take_claimed(const unsigned char* smem, uint32_t smem_address, const KeyWorks& works,
                                             KeyWork& work, uint32_t parity) {
  mbarrier_wait(smem_address + Smem::K_FULL, parity);
  const int number = reinterpret_cast<const int*>(smem + Smem::CLAIM)[parity];
  if (number >= 0) work = works.at(number);
  return number >= 0;
}

// DQ_SHARE: of the sums of a tile where a warp's part of the shared dimensions begins.
__device__ __forceinline__ int share_of_dq(int warpgroup, int warp) {
  return WARPGROUPS * Sums::TILE_FLOATS + warp * Sums::WARP_FLOATS + warpgroup * (16 * DQ_SHARE);
}

constexpr uint32_t STORED = 1u << 31;  // a bit of the word of a tile of dQ, FIRST_STORES

struct Producer {
  unsigned char* smem;
  const KeyWorks& works;
  KeyWork& work;  // at hand
  const QueryTerms& terms;
  int group;  // heads of the block's K/V head
  const TensorMap &q_map, &k_map, &v_map, &do_map, &bias_map, &half_map;
  bool bias_of_heads, bias_of_batches;  // else they share it
  float* dq_sums_gmem;
  uint32_t* progress_gmem;

  __device__ __forceinline__ void run(int warp) const {
    const uint32_t smem_address = shared_address(smem);
    const bool copies = warp == 4 * WARPGROUPS && threadIdx.x % 32 == 0;
    if (copies) {
      prefetch_tensor_map(q_map), prefetch_tensor_map(k_map), prefetch_tensor_map(v_map), prefetch_tensor_map(do_map);
      Smem::init_barriers(smem_address);
    }
    __syncwarp();
    if constexpr (PAIRED) cluster_sync();  // those of both blocks are initialised
    else if (DQ_BY_WARP && warp == 4 * WARPGROUPS + 1) named_barrier_sync<THREADS>(BARRIERS_READY);
    else named_barrier_arrive<THREADS>(BARRIERS_READY);  // others see the initialised barriers
    if constexpr (PRODUCER_REGISTERS > 0) decrease_registers<PRODUCER_REGISTERS>();
    if (warp == 4 * WARPGROUPS) {
      if (BlockStates::LISTED || copies) copy(smem_address);
    } else if (DQ_BY_WARP && warp == 4 * WARPGROUPS + 1) {
      if (BlockStates::LISTED || threadIdx.x % 32 == 0) add_dq(smem_address);
    }
  }

private:
  // Of a warp that goes through a block list one thread issues the copies.
  static __device__ __forceinline__ bool issues() { return !BlockStates::LISTED || threadIdx.x % 32 == 0; }
  __device__ __forceinline__ void copy(uint32_t smem_address) const {
    RingPosition<Q_STAGES> q;
    RingPosition<DO_STAGES> d;
    if constexpr (CLAIMED) {
      int number = works.first();
      for (uint32_t parity = 0, round = 0;; parity ^= 1, ++round) {
        while (VARLEN && number < works.blocks && !work.any) {
          if (round == 0) grid_dependency_wait();
          number = claim(number);
        }
        const bool any = number < works.blocks;
        QueryWalk walk(work.block, group);
        const bool early = round > 0 && any && !walk.done();
        if (early) load_queries(smem_address, walk, q, d), q.advance(), d.advance(), walk.advance(work.block);
        if (round > 0)
          mbarrier_wait(smem_address + Smem::K_EMPTY, parity ^ 1);  // no warp reads the last K and V any more
        reinterpret_cast<int*>(smem + Smem::CLAIM)[parity] = any ? number : -1;
        if (!any) {
          mbarrier_arrive(smem_address + Smem::K_FULL);
          return;
        }
        load_keys(smem_address);
        if (round == 0) grid_dependency_wait();
        for (; !walk.done(); walk.advance(work.block)) {
          load_queries(smem_address, walk, q, d);
          q.advance(), d.advance();
        }
        number = claim(number);
      }
    } else {
      if (issues()) load_keys(smem_address);
      grid_dependency_wait();  // the terms of the queries are there, and the sums of dQ are 0
      for (QueryWalk walk(work.block, group); !walk.done(); walk.advance(work.block)) {
        if (issues()) load_queries(smem_address, walk, q, d);
        q.advance(), d.advance();
      }
    }
  }
  // The number of the next tile of keys, which is at hand then if there is one.
  __device__ __forceinline__ int claim(int last) const {
    const int at_once = works.at_once();
    int number = last + 1;
    if (number % at_once == 0) number = (blocks_read_again() + int(count_one(progress_gmem))) * at_once;
    if (number < works.blocks) work = works.at(number);
    return number;
  }
  __device__ __forceinline__ void load_queries(uint32_t smem_address, const QueryWalk& walk, RingPosition<Q_STAGES> q,
                                               RingPosition<DO_STAGES> d) const {
    const int64_t tile = terms.tile(work, walk.head, walk.tile) * BLOCK_M;
    if constexpr (BlockStates::LISTED) {
      mbarrier_wait(smem_address + Smem::Q_EMPTY + 8 * q.stage, q.parity ^ 1);
      *reinterpret_cast<ToldTile::Word*>(smem + Smem::TOLD + 8 * q.stage) = walk.word();
    }
    load<Tiles>(smem_address + Smem::Q + q.stage * Smem::Q_TILE_BYTES, q_map, walk,
                smem_address + Smem::Q_FULL + 8 * q.stage, smem_address + Smem::Q_EMPTY + 8 * q.stage, q.parity,
                smem_address + Smem::LOG_SUMS + q.stage * BLOCK_M * 4, terms.log_sums_gmem + tile);
    if constexpr (BIAS)
      load_bias(smem_address + Smem::BIAS_TILE + q.stage * (KEY_GROUPS * Smem::BIAS_GROUP_BYTES), walk,
                smem_address + Smem::Q_FULL + 8 * q.stage);
    load<ValueTiles>(smem_address + Smem::DO + d.stage * Smem::DO_TILE_BYTES, do_map, walk,
                     smem_address + Smem::DO_FULL + 8 * d.stage, smem_address + Smem::DO_EMPTY + 8 * d.stage, d.parity,
                     smem_address + Smem::DELTAS + d.stage * BLOCK_M * 4, terms.deltas_gmem + tile);
  }
  // Adds what the consumers leave of dQ to its sums, a warpgroup's part at a time. FIRST_STORES: of all blocks that do
  // so the first stores its part, and others wait until that is in memory.
  __device__ __forceinline__ void add_dq(uint32_t smem_address) const {
    grid_dependency_wait();  // the sums are 0, or FIRST_STORES: what `added_to` counts is
    uint32_t parity = 0;
    if constexpr (CLAIMED) {
      for (uint32_t round = 0; take_claimed(smem, smem_address, works, work, round % 2); ++round) {
        mbarrier_arrive(smem_address + Smem::K_EMPTY);  // the number has been read
        add_tiles(smem_address, parity);
      }
    } else {
      add_tiles(smem_address, parity);
    }
  }
  // Those of a tile of keys. `parity`: of dQ's barriers.
  __device__ __forceinline__ void add_tiles(uint32_t smem_address, uint32_t& parity) const {
    for (QueryWalk walk(work.block, group); !walk.done(); walk.advance(work.block), parity ^= 1) {
      float* sums = dq_sums_gmem + terms.tile(work, walk.head, walk.tile) * Sums::FLOATS +
                    work.block.first_part() * Sums::TILE_FLOATS;
      const uint32_t turn = IN_ORDER ? blocks_before(walk) : 0;
      if (!issues()) continue;
      bool first = IN_ORDER && turn == 0;
      if (FIRST_STORES && !IN_ORDER && peek(added_to(walk)) == 0) {
        mbarrier_wait(smem_address + Smem::DQ_FULL, parity);  // until then others need not wait for this block
        first = count_one(added_to(walk)) == 0;
      }
      if (IN_ORDER || (FIRST_STORES && !first)) {
        while (acquire(added_to(walk)) < (IN_ORDER ? turn : STORED)) {}
        fence_proxy_async_all();
      }
#pragma unroll
      for (int i = 0; i < DQ_GROUPS; ++i) {
        mbarrier_wait(smem_address + Smem::DQ_FULL + 8 * i, parity);
        const uint32_t from_smem = smem_address + Smem::DQ + i * Smem::DQ_GROUP_BYTES;
        auto move = [&](int to, int from, int bytes) {
          if (FIRST_STORES && first) bulk_store(sums + to, from_smem + from, bytes);
          else bulk_add(sums + to, from_smem + from, bytes);
        };
        move(i * Sums::TILE_FLOATS, 0, 4 * Smem::DQ_WARP_BYTES);
#pragma unroll
        for (int warp = 0; DQ_SHARE > 0 && warp < 4; ++warp)
          move(share_of_dq(i, warp), 4 * Smem::DQ_WARP_BYTES + warp * Smem::DQ_SHARE_BYTES, Smem::DQ_SHARE_BYTES);
        tma_store_commit();
      }
      release<DQ_GROUPS>(smem_address);
      if (IN_ORDER || (FIRST_STORES && first)) {
        tma_store_wait();
        if constexpr (IN_ORDER) release_one(added_to(walk));
        else exchange_bits(added_to(walk), STORED);
      }
    }
  }
  // Blocks that have added to a tile of dQ, and with FIRST_STORES the bit `STORED`; and, IN_ORDER, those that do so
  // before this one: under a diagonal those of later keys, and by a block list, which may hide those behind one too, if
  // they see the tile; else those of earlier ones; ROTATED, those that come to it after fewer others.
  __device__ __forceinline__ uint32_t* added_to(const QueryWalk& walk) const {
    return progress_gmem + CLAIMED + terms.tile(work, walk.head, walk.tile);
  }
  __device__ __forceinline__ uint32_t blocks_before(const QueryWalk& walk) const {
    const int tile = walk.tile;
    const KeyBlock& block = work.block;
    const Mask& mask = work.mask;
    if constexpr (BlockStates::LISTED)
      return block.states.behind<BLOCK_N>(block.batch, walk.head, tile * BLOCK_M, block.key_tile,
                                          (mask.seqlen_k + BLOCK_N - 1) / BLOCK_N, threadIdx.x % 32);
    if constexpr (CAUSAL) return (mask.keys_before((tile + 1) * BLOCK_M) - 1) / BLOCK_N - block.key_tile;
    if constexpr (!ROTATED) return block.key_tile;
    // Blocks whose keys are as many tiles apart as there are tiles of queries begin with the same one.
    const int tiles = block.tiles, blocks = (mask.seqlen_k + BLOCK_N - 1) / BLOCK_N, more = blocks % tiles;
    const int passed = (tile + tiles - block.key_tile % tiles) % tiles;  // before this block comes to the tile
    // Those that have passed fewer began with the tile itself or with one of the `passed` - 1 ahead of it.
    const int low = tile - passed + 1, high = tiles + min(low, 0);  // from `low`, or from `high` on and to `tile`
    const int in_turn = max(0, min(tile + 1, more) - max(low, 0)) * (passed > 0) + max(0, more - high);
    return blocks / tiles * passed + in_turn + block.key_tile / tiles;
  }
  // The first copies are the first to have read their part.
  template <int PARTS> __device__ __forceinline__ void release(uint32_t smem_address) const {
    tma_store_wait_read<PARTS - 1>();
    mbarrier_arrive(smem_address + Smem::DQ_EMPTY + 8 * (DQ_GROUPS - PARTS));
    if constexpr (PARTS > 1) release<PARTS - 1>(smem_address);
  }
  // A tile of Q or dO, and a term of its queries.
  template <class Of>
  __device__ __forceinline__ void load(uint32_t tile_smem, const TensorMap& map, const QueryWalk& walk, uint32_t full,
                                       uint32_t empty, uint32_t parity, uint32_t term_smem,
                                       const float* term_gmem) const {
    mbarrier_wait(empty, parity ^ 1);
    if (ONE_LAUNCH && dq_sums_gmem == nullptr) {  // consumers make them
      mbarrier_arrive(full);
    } else {
      mbarrier_arrive_expect_tx(full, BLOCK_M * 4);
      bulk_load(term_smem, term_gmem, BLOCK_M * 4, full);
    }
    const int row = walk.tile * BLOCK_M;
    if constexpr (VARLEN)
      Of::template load_sliding<BLOCK_M>(tile_smem, map, full, row, work.sequence.queries, work.sequence.end_query(),
                                         walk.head);
    else Of::template load<BLOCK_M>(tile_smem, map, full, row, walk.head, work.block.batch);
  }
  // The bias of a tile of Q, whose place is empty: [64 keys][queries], as a tile of 64 columns.
  __device__ __forceinline__ void load_bias(uint32_t tile_smem, const QueryWalk& walk, uint32_t full) const {
    mbarrier_arrive_expect_tx(full, KEY_GROUPS * Smem::BIAS_GROUP_BYTES);
#pragma unroll
    for (int i = 0; i < KEY_GROUPS; ++i)
      tma_load_4d(tile_smem + i * Smem::BIAS_GROUP_BYTES, bias_map, full, work.block.first_key + i * 64,
                  walk.tile * BLOCK_M, bias_of_heads ? walk.head : 0, bias_of_batches ? work.block.batch : 0);
  }
  __device__ __forceinline__ void load_keys(uint32_t smem_address) const {
    load_keys_of<Tiles>(smem_address + Smem::K, k_map, smem_address + Smem::K_FULL);
    if constexpr (PAIRED) load_half_of_other(smem_address + Smem::OTHER_K, smem_address + Smem::K_FULL);
    load_keys_of<ValueTiles>(smem_address + Smem::V, v_map, smem_address + Smem::V_FULL);
  }
  // PAIRED: of the other block's keys the columns of this block's part of dQ.
  __device__ __forceinline__ void load_half_of_other(uint32_t half_smem, uint32_t full) const {
    constexpr int HALF = Tiles::CHUNKS / 2;
    const int other = work.block.key_tile ^ 1;
    mbarrier_arrive_expect_tx(full, Tiles::bytes(BLOCK_N) / 2);
#pragma unroll
    for (int i = 0; i < HALF; ++i)
      tma_load_5d(half_smem + i * BLOCK_N * 128, half_map, full, 0, other * BLOCK_N, work.block.key_tile % 2 * HALF + i,
                  work.block.kv_head, work.block.batch);
  }
  template <class Of>
  __device__ __forceinline__ void load_keys_of(uint32_t tile_smem, const TensorMap& map, uint32_t full) const {
    const int key = work.block.first_key, head = work.block.kv_head;
    const Sequence& sequence = work.sequence;
    if constexpr (VARLEN)
      Of::template load_sliding<BLOCK_N>(tile_smem, map, full, key, sequence.keys, sequence.end_key(), head);
    else Of::template load<BLOCK_N>(tile_smem, map, full, key, head, work.block.batch);
  }
};
