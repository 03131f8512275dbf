// producer.cuh: the warp of backward_wgmma that brings tiles into shared memory: K and V once, Q and dO with their
// terms for each tile of queries. One thread issues every copy. Needs the constants of backward_wgmma.cu.j2.
#include "device/ptx/bulk.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/ring_position.cuh"
#include "device/copy/tensor_tile.cuh"
#include "backward_wgmma/query_walk.cuh"
#include "backward_wgmma/shared_layout.cuh"

// The terms of the queries, which `row_terms.cuh` made: [batch, heads, tiles, BLOCK_M] each.
struct QueryTerms {
  const float *log_sums_gmem, *deltas_gmem;
  int heads, tiles;

  __device__ __forceinline__ int64_t tile(int batch, int head, int tile) const {
    return (int64_t(batch) * heads + head) * tiles + tile;
  }
};

struct Producer {
  unsigned char* smem;
  const KeyBlock& block;
  const QueryTerms& terms;
  int group;
  const TensorMap &q_map, &k_map, &v_map, &do_map;

  __device__ __forceinline__ void run(int warp) const {
    const uint32_t smem_address = shared_address(smem);
    const bool copies = warp == 4 * WARPGROUPS && threadIdx.x % 32 == 0;
    if (copies) {
      prefetch_tensor_map(q_map), prefetch_tensor_map(k_map), prefetch_tensor_map(v_map), prefetch_tensor_map(do_map);
      Smem::init_barriers(smem_address);
    }
    __syncwarp();
    named_barrier_arrive<THREADS>(BARRIERS_READY);  // others see the initialised barriers
    if constexpr (PRODUCER_REGISTERS > 0) decrease_registers<PRODUCER_REGISTERS>();
    if (copies) copy(smem_address);
  }

private:
  __device__ __forceinline__ void copy(uint32_t smem_address) const {
    Tiles::template load<BLOCK_N>(smem_address + Smem::K, k_map, smem_address + Smem::K_FULL, block.first_key,
                                  block.kv_head, block.batch);
    ValueTiles::template load<BLOCK_N>(smem_address + Smem::V, v_map, smem_address + Smem::V_FULL, block.first_key,
                                       block.kv_head, block.batch);
    grid_dependency_wait();  // the terms of the queries are there, and the sums of dQ are 0
    RingPosition<Q_STAGES> q;
    RingPosition<DO_STAGES> d;
    for (QueryWalk walk(block, group); !walk.done(); walk.advance(block)) {
      const int64_t tile = terms.tile(block.batch, walk.head, walk.tile) * BLOCK_M;
      load<Tiles>(smem_address + Smem::Q + q.stage * Smem::Q_TILE_BYTES, q_map, walk,
                  smem_address + Smem::Q_FULL + 8 * q.stage, smem_address + Smem::Q_EMPTY + 8 * q.stage, q.parity,
                  smem_address + Smem::LOG_SUMS + q.stage * BLOCK_M * 4, terms.log_sums_gmem + tile);
      load<ValueTiles>(smem_address + Smem::DO + d.stage * Smem::DO_TILE_BYTES, do_map, walk,
                       smem_address + Smem::DO_FULL + 8 * d.stage, smem_address + Smem::DO_EMPTY + 8 * d.stage,
                       d.parity, smem_address + Smem::DELTAS + d.stage * BLOCK_M * 4, terms.deltas_gmem + tile);
      q.advance(), d.advance();
    }
  }
  // A tile of Q or dO, and a term of its queries.
  template <class Of>
  __device__ __forceinline__ void load(uint32_t tile_smem, const TensorMap& map, const QueryWalk& walk, uint32_t full,
                                       uint32_t empty, uint32_t parity, uint32_t term_smem,
                                       const float* term_gmem) const {
    mbarrier_wait(empty, parity ^ 1);
    mbarrier_arrive_expect_tx(full, BLOCK_M * 4);
    bulk_load(term_smem, term_gmem, BLOCK_M * 4, full);
    Of::template load<BLOCK_M>(tile_smem, map, full, walk.tile * BLOCK_M, walk.head, block.batch);
  }
};
