// epilogue.cuh: the end of a tile of rows of a consumer warpgroup: sums and O, merged where blocks share keys, to
// global memory. Needs the constants of flash_wgmma.cu.j2.
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/read_again.cuh"
#include "device/ptx/tma.cuh"
#include "device/copy/wgmma_output.cuh"
#include "flash_wgmma/hand_over.cuh"
#include "flash_wgmma/key_split.cuh"
#include "flash_wgmma/sum_parts.cuh"
#include "flash_wgmma/tile_scheduler.cuh"

// Where O goes.
struct Output {
  const TensorMap& o_map;
  Element* o_gmem;
  float* lse_gmem;
  uint32_t* counters_zeroed;
  float4* results_gmem;
  int64_t o_batch_stride, o_head_stride, o_row_stride;
  const Scales& scales;
};

struct Epilogue : Block, Output {
  static constexpr bool INVERSE_BESIDE = OVERLAP && KEY_SPLIT == 1 && !PERSISTENT && !IN_PARTS;  // the last P V
  const TileScheduler& work;
  int thread;                        // of the warpgroup
  uint32_t o_smem;                   // O of the warpgroup
  float (&inverse)[2];               // of the sums of a tile of rows
  typename Scales::Running running;  // BY_BLOCK: scales of the tile at hand

  __device__ __forceinline__ Epilogue(const TileScheduler& work, const Output& output, float (&inverse)[2])
      : Block(work), Output(output), work(work), inverse(inverse) {
    thread = threadIdx.x % 128;
  }
  // Of this warpgroup; row g of this lane.
  __device__ __forceinline__ int first_row(const Tile& of) const { return of.row_block * BLOCK_M + warpgroup * 64; }
  __device__ __forceinline__ int lane_row(const Tile& of) const { return first_row(of) + thread / 32 * 16 + lane / 4; }
  // Of the tile at hand; those of a warp.
  __device__ __forceinline__ bool has_rows() const {
    return FEW_ROWS ? thread < 32 : first_row(work.tile) + thread / 32 * 16 < work.rows.count;
  }

  // IN_MEMORY: [tiles, results of a tile, WARPGROUPS]: the first of this warpgroup.
  __device__ __forceinline__ float4* rows_results() const {
    const int64_t index = (work.tile.batch * work.rows.heads + work.tile.head) * work.row_blocks + work.tile.row_block;
    const int results = IN_PARTS ? max(KEY_SPLIT, KeyParts::of(work.key_tiles - 1) + 1) : KEY_SPLIT;
    return results_gmem + (index * results * WARPGROUPS + warpgroup) * (Partial::PIECES * 128);
  }
  __device__ __forceinline__ void leave_part(int part, const RowState& state, const float (&o)[OUT_DIM / 2]) const {
    if (has_rows())
      Partial::leave(rows_results() + int64_t(part) * WARPGROUPS * (Partial::PIECES * 128), o, state, thread);
  }
  // What O of a tile of rows is multiplied by at last.
  __device__ __forceinline__ void make_inverse(const RowState& of_rows, const Tile& of, int row) {
    inverse_sums(of_rows, work.terms, [&](int below) { return work.rows.head(of, row + below); }, inverse);
    if constexpr (Scales::GIVEN) {
      const float scale = Scales::BY_BLOCK ? running.of_values() : scales.of_values(of.batch, work.kv_head(of));
      inverse[0] *= scale, inverse[1] *= scale;
    }
  }
  __device__ __forceinline__ bool exists(const Tile& of, const Sequence& of_sequence, int row) const {
    if (FEW_ROWS && row >= first_row(of) + BLOCK_M) return false;
    return VARLEN ? work.rows.exists(row, of_sequence.queries) : work.rows.exists(row);
  }
  // Of rows `row` and `row` + 8 of a tile.
  __device__ __forceinline__ void store_log_sums(const RowState& of_rows, const Tile& of, const Sequence& of_sequence,
                                                 int row, int of_lane) const {
    auto head_of = [&](int below) { return work.rows.head(of, row + below); };
    log_sums_to_global(
        of_rows, work.terms, head_of,
        [&](int below) {
          if constexpr (VARLEN) {
            const int query = of_sequence.first_query + work.rows.query(row + below);
            return lse_gmem + int64_t(head_of(below)) * work.terms.given.total_queries + query;
          }
          return lse_gmem + (int64_t(of.batch) * work.heads + head_of(below)) * work.seqlen_q +
                 work.rows.query(row + below);
        },
        [&](int below) { return exists(of, of_sequence, row + below); }, of_lane);
  }
  // Of these rows the lane's numbers of a tile of 8 columns of O, before the division.
  __device__ __forceinline__ void store_columns(const float4& sum, const Tile& of, const Sequence& of_sequence, int row,
                                                int column_tile) const {
#pragma unroll
    for (int below = 0; below < 16; below += 8) {
      if (!exists(of, of_sequence, row + below)) continue;
      const int64_t first = VARLEN ? of_sequence.first_query * o_row_stride : of.batch * o_batch_stride;
      Element* row_gmem = o_gmem + first + work.rows.head(of, row + below) * o_head_stride +
                          work.rows.query(row + below) * o_row_stride;
      *reinterpret_cast<uint32_t*>(row_gmem + column_tile * 8 + lane % 4 * 2) =
          pack2<Element>((below ? sum.z : sum.x) * inverse[below / 8], (below ? sum.w : sum.y) * inverse[below / 8]);
    }
  }
  // SHARES_SEQUENCES: this block leaves its result of a tile of rows beside those of other blocks, `first_block` and
  // the next; whoever is the last adds up all. Results: [blocks, 2, WARPGROUPS]: of the first of them the second one,
  // of all others the first.
  __device__ __forceinline__ void merge_sharers(const Tile& of, const Sequence& of_sequence, int sharers,
                                                int first_block, const RowState& of_rows,
                                                const float (&o)[OUT_DIM / 2]) {
    constexpr int RESULT = Partial::PIECES * 128, AT_ONCE = 4, RESULTS_AT_ONCE = 4;
    constexpr int GROUPS = (COLUMN_TILES + AT_ONCE - 1) / AT_ONCE;
    const int rows = (of_sequence.queries << work.rows.row_bits()) - first_row(of), own_warp = thread / 32;
    if (rows <= 0) return;
    const int row_warps = min(4, (rows + 15) / 16);
    auto result_gmem = [&](int sharer) {
      return results_gmem + ((2 * (first_block + sharer) + (sharer == 0)) * WARPGROUPS + warpgroup) * RESULT;
    };
    if (own_warp < row_warps) Partial::leave(result_gmem(int(blockIdx.x) - first_block), o, of_rows, thread);
    named_barrier_sync<128>(O_TILE + warpgroup);  // all threads of the warpgroup have left their part
    uint32_t* last_smem = reinterpret_cast<uint32_t*>(smem + (o_smem - smem_address));
    if (thread == 0) *last_smem = exchange_count(counters_zeroed + first_block * WARPGROUPS + warpgroup, sharers - 1);
    named_barrier_sync<128>(O_TILE + warpgroup);  // what thread 0 has acquired all threads may read
    const bool is_last = *last_smem == sharers - 1;
    named_barrier_sync<128>(O_TILE + warpgroup);  // all have read it, in whose place comes the next O
    if (!is_last) return;
#pragma unroll 1
    for (int item = own_warp; item < row_warps * GROUPS; item += 4) {  // all warps, however few have rows
      const int row_warp = item / GROUPS, column_tile = item % GROUPS * AT_ONCE;
      RowState of_all;
      of_all.clear();
      float4 sums[AT_ONCE] = {};
#pragma unroll 1
      for (int first = 0; first < sharers; first += RESULTS_AT_ONCE) {
        float4 state[RESULTS_AT_ONCE], more[RESULTS_AT_ONCE][AT_ONCE];
#pragma unroll
        for (int i = 0; i < RESULTS_AT_ONCE; ++i) {
          const float4* of_one = result_gmem(min(first + i, sharers - 1)) + row_warp * 32 + lane;
          state[i] = __ldcg(of_one);
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j)
            more[i][j] = __ldcg(of_one + (min(column_tile + j, COLUMN_TILES - 1) + 1) * 128);
        }
#pragma unroll
        for (int i = 0; i < RESULTS_AT_ONCE; ++i) {
          if (first + i >= sharers) break;
          float low[2], own[2];
          Partial::take_turn(RowState{{state[i].x, state[i].y}, {state[i].z, state[i].w}}, of_all, low, own);
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j)
            sums[j] = Partial::turn(sums[j], more[i][j].x, more[i][j].y, more[i][j].z, more[i][j].w, low, own);
        }
      }
      const int row = first_row(of) + row_warp * 16 + lane / 4;
      make_inverse(of_all, of, row);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (column_tile + j < COLUMN_TILES) store_columns(sums[j], of, of_sequence, row, column_tile + j);
      if (WRITE_LSE && column_tile == 0) store_log_sums(of_all, of, of_sequence, row, lane);
    }
  }
  // O of a tile of rows, to global memory.
  __device__ __forceinline__ void finish_rows(const Tile& of, const Sequence& of_sequence, KeyRange of_keys,
                                              RowState& of_rows, float (&o)[OUT_DIM / 2]) {
    // BALANCED has more branches than registers to keep addresses of the end through the loop over keys: they are made
    // here.
    const int end_thread = SCHEDULE == Schedule::BALANCED ? thread_read_again() : thread;
    const int end_lane = SCHEDULE == Schedule::BALANCED ? end_thread % 32 : lane;
    // A tile of rows that two blocks share: the one with the first keys gives.
    if constexpr (SHARES_SEQUENCES) {
      if (of_keys.sharers) {
        merge_sharers(of, of_sequence, of_keys.sharers >> 16, of_keys.sharers & 0xffff, of_rows, o);
        return;
      }
    } else if constexpr (SCHEDULE == Schedule::BALANCED) {
      if constexpr (Scales::BY_BLOCK) {  // blocks have their own units
        const float unit = running.take_unit();
#pragma unroll
        for (int i = 0; i < OUT_DIM / 2; ++i) o[i] *= unit;
      }
      if (of_keys.gives()) {
        const int giver = (blockIdx.y * gridDim.x + blockIdx.x) * WARPGROUPS + warpgroup;
        Partial::leave(results_gmem + giver * Partial::PIECES * 128, o, of_rows, end_thread);
        named_barrier_sync<128>(O_TILE + warpgroup);  // all threads of the warpgroup have left their part
        if (end_thread == 0) give(counters_zeroed + giver);
        return;
      }
      if (!IN_PARTS && of_keys.takes()) {
        const int giver = ((blockIdx.y - 1) * gridDim.x + blockIdx.x) * WARPGROUPS + warpgroup;
        if (end_thread == 0) take(counters_zeroed + giver);
        named_barrier_sync<128>(O_TILE + warpgroup);  // what thread 0 has acquired all threads may read
        Partial::add_left(results_gmem + giver * Partial::PIECES * 128, o, of_rows, end_thread);
      }
    }
    auto end_row = [&] { return first_row(of) + end_thread / 32 * 16 + end_lane / 4; };  // row g of this lane
    if constexpr (!INVERSE_BESIDE) make_inverse(of_rows, of, end_row());
    const int warp_row = first_row(of) + end_thread / 32 * 16;
    if constexpr (WRITE_LSE) store_log_sums(of_rows, of, of_sequence, end_row(), end_lane);
    if constexpr (PERSISTENT && STORE != Store::ROWS) {
      if (end_thread == 0) tma_store_wait_read();
      named_barrier_sync<128>(O_TILE + warpgroup);  // the store of the last tile has read this memory
    }
    if constexpr (STORE == Store::CHUNKS) {
#pragma unroll
      for (int chunk = 0; chunk < OutputTiles::CHUNKS; ++chunk) {
        if (chunk >= 2) {
          if (end_thread == 0) tma_store_wait_read<1>();
          named_barrier_sync<128>(O_TILE + warpgroup);  // the store of the chunk before the last has read its place
        }
        const uint32_t chunk_smem = o_smem + chunk % 2 * Smem::O_CHUNK_BYTES;
        output_to_shared<Element>(o, inverse, chunk_smem, end_thread / 32, end_lane, 8 * chunk,
                                  min(8 * chunk + 8, OUT_DIM / 8));
        fence_proxy_async();
        named_barrier_sync<128>(O_TILE + warpgroup);  // all rows of the warpgroup are written
        if (end_thread == 0) {
          if constexpr (VARLEN) {
            OutputTiles::store_sliding(o_map, chunk_smem, chunk, chunk + 1, first_row(of), of_sequence.queries,
                                       of_sequence.end_query(), of.head);
          } else {
            work.rows.store_chunk<OutputTiles>(o_map, chunk_smem, chunk, first_row(of), of);
          }
        }
      }
    } else {
      // Over rows of Q, if any, that this warp alone multiplies.
      output_to_shared<Element>(o, inverse, o_smem, end_thread / 32, end_lane);
      if constexpr (STORE == Store::TENSOR_MAP) {
        fence_proxy_async();
        named_barrier_sync<128>(O_TILE + warpgroup);  // all rows of the warpgroup are written
        if (end_thread == 0) {
          if constexpr (VARLEN) {
            OutputTiles::store_sliding(o_map, o_smem, 0, OutputTiles::CHUNKS, first_row(of), of_sequence.queries,
                                       of_sequence.end_query(), of.head);
          } else {
            work.rows.store<OutputTiles>(o_map, o_smem, first_row(of), of);
          }
        }
      } else {
        __syncwarp();  // all rows of the warp are written
        if constexpr (GROUP_ROWS) {
          rows_to_places<OUT_DIM>(
              smem + (o_smem - smem_address),
              [&](int row) {
                const int64_t first = VARLEN ? of_sequence.first_query * o_row_stride : of.batch * o_batch_stride;
                return o_gmem + first + work.rows.head(of, warp_row + row) * o_head_stride +
                       work.rows.query(warp_row + row) * o_row_stride;
              },
              [&](int row) { return exists(of, of_sequence, warp_row + row); }, end_thread / 32, end_lane);
        } else {
          Element* head_gmem = VARLEN ? o_gmem + of.head * o_head_stride + of_sequence.first_query * o_row_stride
                                      : o_gmem + of.batch * o_batch_stride + of.head * o_head_stride;
          const int most = VARLEN ? of_sequence.queries : work.seqlen_q;
          const int queries = FEW_ROWS ? min(most, first_row(of) + BLOCK_M) : most;
          rows_to_global<OUT_DIM>(smem + (o_smem - smem_address), head_gmem + warp_row * o_row_stride, o_row_stride,
                                  queries - warp_row, end_thread / 32, end_lane);
        }
      }
    }
  }
  // The sum of 8 columns of the tile of rows at hand, which several blocks have made.
  __device__ __forceinline__ void finish_columns(const float4& sum, const RowState& of_all, int column_tile) {
    const int row = FEW_ROWS ? first_row(work.tile) + lane / 4 : lane_row(work.tile);
    make_inverse(of_all, work.tile, row);
    store_columns(sum, work.tile, work.sequence, row, column_tile);
    if (WRITE_LSE && column_tile == 0) store_log_sums(of_all, work.tile, work.sequence, row, lane);
  }
  // IN_PARTS, a cluster: each block has one part, and adds up every CLUSTER-th 8 columns of all; of few rows by all
  // warps, though the first alone sends any.
  __device__ __forceinline__ void merge_columns(const RowState& state, const float (&o)[OUT_DIM / 2]) {
    const int slots = Smem::PARTIALS + warpgroup * SLOT_PIECES * 128 * 16, full = barrier(Smem::PARTIALS_FULL, 0);
    if (FEW_ROWS && !has_rows()) {
      __syncwarp();
      cluster_wait();
      mbarrier_wait_cluster(full, 0);
    } else {
      Partial::scatter<CLUSTER, OWN_TILES>(smem_address + slots + work.split * Smem::SLOT_BYTES, full, o, state,
                                           thread);
    }
    if (!FEW_ROWS && !has_rows()) return;
    auto piece = [&](int part, int i) {
      const int place = (i * 128 + (FEW_ROWS ? lane : thread)) * 16;
      return *reinterpret_cast<const float4*>(smem + slots + part * Smem::SLOT_BYTES + place);
    };
#pragma unroll 1
    for (int i = FEW_ROWS ? thread / 32 : 0; work.split + i * CLUSTER < COLUMN_TILES; i += FEW_ROWS ? 4 : 1) {
      RowState of_all;
      const float4 sum = Partial::total_in_turn<4>(piece, 0, CLUSTER - 1, i, of_all);
      finish_columns(sum, of_all, work.split + i * CLUSTER);
    }
  }
  // IN_MEMORY: each block leaves its result, and each of the first SHARERS owns a part of the columns, whose sum it
  // makes unless it has left (`sum_parts.cuh`). A word for each part: [tiles, WARPGROUPS, SHARERS]. `result`: which of
  // its tile's; IN_PARTS the last that this block leaves.
  __device__ __forceinline__ void merge_rows(const RowState& state, const float (&o)[OUT_DIM / 2], int result) {
    constexpr int SHARERS = KEY_SPLIT < COLUMN_TILES ? KEY_SPLIT : COLUMN_TILES;
    static_assert(SHARERS <= 32, "a lane for each part");
    constexpr int RESULT = Partial::PIECES * 128;
    const int index = (work.tile.batch * work.rows.heads + work.tile.head) * work.row_blocks + work.tile.row_block;
    const float4* left_gmem = rows_results();
    uint32_t* parts_gmem = counters_zeroed + (index * WARPGROUPS + warpgroup) * SHARERS;
    uint32_t* parts_smem = reinterpret_cast<uint32_t*>(smem + (o_smem - smem_address));  // Q's place, which was read
    leave_part(result, state, o);
    named_barrier_sync<128>(O_TILE + warpgroup);  // all threads of the warpgroup have left their part
    if (thread < 32) {
      const bool adds = thread < SHARERS && bring_result<KEY_SPLIT>(parts_gmem + thread, thread == work.split);
      const uint32_t parts_added = __ballot_sync(ALL_LANES, adds);
      if (thread == 0) *parts_smem = parts_added;
    }
    named_barrier_sync<128>(O_TILE + warpgroup);  // all threads see the parts, and may read all results of these
    if (!FEW_ROWS && !has_rows()) return;         // of few rows all warps add up columns
    auto add_columns = [&](int column_tile) {
      RowState of_all;
      float4 sum;
      if constexpr (IN_PARTS) {
        auto piece = [&](int part, int i) {
          return __ldcg(left_gmem + int64_t(part) * (WARPGROUPS * RESULT) + i * 128 + (FEW_ROWS ? lane : thread));
        };
        sum = Partial::total_in_turn<FEW_ROWS ? 8 : 4>(piece, work.first_part(work.tile.row_block),
                                                       work.last_part(work.tile.row_block), column_tile, of_all);
      } else {
        sum = Partial::total<KEY_SPLIT>(left_gmem, WARPGROUPS * RESULT, column_tile, of_all, thread);
      }
      finish_columns(sum, of_all, column_tile);
    };
    const int own = FEW_ROWS ? thread / 32 * SHARERS : 0, step = (FEW_ROWS ? 4 : 1) * SHARERS;
    uint32_t parts = *parts_smem;
    while (parts) {  // its own, and those whose owners have left
      const int part = 31 - __clz(parts);
      parts ^= 1u << part;
      for (int column_tile = part + own; column_tile < COLUMN_TILES; column_tile += step) add_columns(column_tile);
    }
  }
};
