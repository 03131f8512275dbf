// shared_columns.cuh: O whose columns two warpgroups share. The one with the scores hands P over in shared memory, with
// the factors by which O follows its shift. Needs the constants of latent_wgmma.cu.j2.
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/stmatrix.cuh"
#include "flash_wgmma/output_sums.cuh"
#include "latent_wgmma/work.cuh"

// P of the other warpgroups: in registers, or where it lies.
template <bool IN_REGISTERS> struct HandedP {
  uint32_t frag[KEY_STEPS][4];
  __device__ __forceinline__ void load(int at, uint32_t p_smem, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < KEY_STEPS; ++i)
      RowOperand<BLOCK_N, false>::fragment(frag[i], at * KEY_STEPS + i, p_smem, warp, lane);
  }
  __device__ __forceinline__ const uint32_t (&operator[](int step) const)[4] { return frag[step]; }
};
template <> struct HandedP<false> : RowOperand<BLOCK_N, false> {
  __device__ __forceinline__ void load(int at, uint32_t p_smem, int warp, int lane) {
    RowOperand<BLOCK_N, false>::load(p_smem, warp, lane);
  }
};

struct SharedColumns : OutputSums {
  static constexpr bool HAS_COLUMNS = !SCORES_ALONE;  // of the warpgroup with the scores
  static constexpr int P_TILES = Operands::P_TILES, MULTIPLYING = 128 * (1 + Operands::HELPERS);        // threads
  static constexpr int P_READY = O_TILE + 1, P_FREE = P_READY + P_TILES, ROWS_DONE = P_FREE + P_TILES;  // barriers
  // Q Kᵀ of rows in registers keeps the tensor cores busy: P V beside it delays the softmax that all wait for, beside
  // which it has them alone. From so many steps on that takes less time (H200, heads of 576; reports/performance.md).
  static constexpr bool TOLD_LATE = SCORES_ALONE && Q_STEPS >= 24;
  const Work& block;
  const uint32_t p_smem;
  float *factors, *inverses;
  const int row;           // rows `row` and `row` + 8 of the tile are the lane's
  const int first_column;  // of O, of this warpgroup
  int turn;                // tiles of P so far

  __device__ __forceinline__ SharedColumns(Fragments& f, const TileScheduler& work, const Output& output)
      : OutputSums(f, work, output),
        block(static_cast<const Work&>(work)),
        p_smem(smem_address + Smem::HANDED),
        factors(reinterpret_cast<float*>(smem + Smem::HANDED + Operands::FACTORS)),
        inverses(reinterpret_cast<float*>(smem + Smem::HANDED + Operands::INVERSES)),
        row(thread / 32 * 16 + lane / 4),
        first_column((warpgroup - SCORES_ALONE) * OUT_DIM),
        turn(0) {}

  // And hands them over.
  template <bool FIRST>
  __device__ __forceinline__ void round_probabilities(uint32_t (&p)[KEY_STEPS][4], float (&s)[BLOCK_N / 2],
                                                      bool rescale) {
    const int tile = turn++ % P_TILES, own_row = thread / 32 * 16 + lane % 16;
    if constexpr (SCORES_ALONE) Operands::pack(p, s);  // before the barrier, at which it waits for longer
    // The others have used the place and its factors.
    if (!FIRST && (P_TILES == 1 || turn > P_TILES)) named_barrier_sync<MULTIPLYING>(P_FREE + tile);
    if constexpr (!SCORES_ALONE) Operands::pack(p, s);
#pragma unroll
    for (int i = 0; i < KEY_STEPS; ++i) {
      const int step = tile * KEY_STEPS + i, column = (step % 4 * 2 + lane / 16) ^ (own_row % 8);
      stmatrix_x4(p_smem + step / 4 * 64 * 128 + own_row * 128 + column * 16, p[i][0], p[i][1], p[i][2], p[i][3]);
    }
    if constexpr (!FIRST) {
      if (!rescale) factor[0] = factor[1] = 1.f;
      if (lane % 4 == 0) factors[tile * 64 + row] = factor[0], factors[tile * 64 + row + 8] = factor[1];
    }
    if constexpr (!SCORES_ALONE) fence_proxy_async();  // wgmma reads it there
    if constexpr (!TOLD_LATE) tell();
  }
  // The others may take the newest P.
  __device__ __forceinline__ void tell() { named_barrier_arrive<MULTIPLYING>(P_READY + (turn - 1) % P_TILES); }
  // Behind the issue of the next tile's Q Kᵀ.
  __device__ __forceinline__ void hand_over() {
    if constexpr (TOLD_LATE) tell();
  }

  // Sums and shifts to whom they concern, by the warpgroup with the scores.
  __device__ __forceinline__ void end_sums(const RowState& of_rows) {
    hand_over();
    if (block.splits == 1) {
      make_inverse(of_rows, work.tile, lane_row(work.tile));
      if constexpr (WRITE_LSE) store_log_sums(of_rows, work.tile, work.sequence, lane_row(work.tile), lane);
      if (lane % 4 == 0) inverses[row] = inverse[0], inverses[row + 8] = inverse[1];
      named_barrier_arrive<MULTIPLYING>(ROWS_DONE);
    } else {
      const float sum[2] = {row_sum(of_rows, 0), row_sum(of_rows, 1)};
      float2* rows_gmem = block.state_gmem + block.result() * 64 + row;
      if (lane % 4 == 0)
        rows_gmem[0] = make_float2(of_rows.shift[0], sum[0]), rows_gmem[8] = make_float2(of_rows.shift[1], sum[1]);
    }
  }
  __device__ __forceinline__ void finish_rows(const Tile&, const Sequence&, KeyRange, const RowState& of_rows,
                                              const float (&)[OUT_DIM / 2]) {
    if constexpr (SCORES_AHEAD) end_sums(of_rows);
  }
  // To global memory, unfinished where keys are split.
  __device__ __forceinline__ void store_columns() {
    if (block.splits == 1) {
      // Over rows of Q that only this warp and its neighbour in the first warpgroup have multiplied.
      const int offset = first_column / 64 * 64 * 128, warp = this->warp % 4, head = block.first_head + warp * 16;
      output_to_shared<Element>(o, inverse, smem_address + offset, warp, lane);
      __syncwarp();  // all rows of the warp are written
      Element* row_gmem = o_gmem + work.tile.batch * o_batch_stride + block.query * o_row_stride +
                          (work.tile.head * block.group_heads + head) * o_head_stride + first_column;
      rows_to_global<OUT_DIM>(smem + offset, row_gmem, o_head_stride, block.group_heads - head, warp, lane);
      return;
    }
    float* row_gmem = block.partial_gmem + (block.result() * 64 + row) * VALUE_DIM + first_column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < OUT_DIM / 2; i += 4) {
      *reinterpret_cast<float2*>(row_gmem + i * 2) = make_float2(o[i], o[i + 1]);
      *reinterpret_cast<float2*>(row_gmem + 8 * VALUE_DIM + i * 2) = make_float2(o[i + 2], o[i + 3]);
    }
  }

  // All of a warpgroup without scores.
  __device__ __forceinline__ void take_columns() {
    named_barrier_sync<THREADS>(BARRIERS_READY);
    increase_registers<HELPER_REGISTERS>();
    clear_output();
    const uint64_t v_descriptor =
        Operands::value_descriptor(smem_address + Smem::V + first_column / 64 * BLOCK_N * 128);
    const int last = work.last_key_tile(), first = work.first_key_tile();
    HandedP<SCORES_ALONE> p;
    Ring ring;
    int at = 0;
    for (int tile = last; tile >= first; --tile, ring.advance()) {
      mbarrier_wait(barrier(Smem::K_FULL, ring.stage), ring.parity);  // visible to this warpgroup too
      named_barrier_sync<MULTIPLYING>(P_READY + at);
      if (tile < last) {
        const float of_tile[2] = {factors[at * 64 + row], factors[at * 64 + row + 8]};
        if (__any_sync(ALL_LANES, of_tile[0] != 1.f || of_tile[1] != 1.f)) scale_rows(o, of_tile);
      }
      // Then there is another tile for this place.
      auto free_p = [&] {
        if (tile > first + P_TILES - 1) named_barrier_arrive<MULTIPLYING>(P_FREE + at);
      };
      p.load(at, p_smem, thread / 32, lane);
      if constexpr (SCORES_ALONE) free_p();
      multiply(p, v_descriptor + descriptor_step(Smem::V_TILE_BYTES) * ring.stage);
      wgmma_wait<0>();
      pin_registers(o);
      if constexpr (!SCORES_ALONE) free_p();
      at = (at + 1) % P_TILES;
      if (lane == 0) mbarrier_arrive(barrier(Smem::K_EMPTY, ring.stage));
    }
    if (block.splits == 1) {
      named_barrier_sync<MULTIPLYING>(ROWS_DONE);
      inverse[0] = inverses[row], inverse[1] = inverses[row + 8];
    }
  }

private:
  // O += P V of its columns.
  __device__ __forceinline__ void multiply(const HandedP<SCORES_ALONE>& p, uint64_t v_descriptor) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step)
#pragma unroll
      for (int part = 0; part < OUT_DIM / PV_COLUMNS; ++part) {
        auto& columns = reinterpret_cast<float(&)[PV_COLUMNS / 2]>(o[part * (PV_COLUMNS / 2)]);
        const int offset = Operands::value_step(step) + part * (PV_COLUMNS / 64) * BLOCK_N * 128;
        wgmma_columns(columns, p[step], v_descriptor + descriptor_step(offset), true);
      }
    wgmma_commit();
  }
};
