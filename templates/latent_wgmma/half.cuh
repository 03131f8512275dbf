// half.cuh: a warpgroup's half of the columns of O: its products, made of P in shared memory by a warpgroup without
// scores, and its way to global memory, unfinished where keys are split. Needs the constants of latent_wgmma.cu.j2.
#include "device/copy/wgmma_output.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/softmax/wgmma_softmax.cuh"
#include "latent_wgmma/probabilities.cuh"
#include "latent_wgmma/work.cuh"

// What a warpgroup holds in arrays, apart from a consumer's numbers: see `flash_wgmma/output_sums.cuh`.
struct Fragments {
  float o[HALF / 2], inverse[2];
  float s[BLOCK_N / 2], next[BLOCK_N / 2];  // scores of a tile of keys, and of that behind it
  float factor[2];
  RegisterP p;
  RowState state;
  uint32_t q_frag[Q_STEPS > 0 ? Q_STEPS : 1][4];  // of the first steps
};

// Where results go.
struct Output {
  Element* o_gmem;
  float *lse_gmem, *partial_gmem;
  float2* state_gmem;
  int64_t o_batch_stride, o_head_stride, o_row_stride;
};

struct Half : Output {
  const Work& work;
  Fragments& f;
  uint32_t p_smem;
  float* factors;   // [P_TILES, 64]
  float* inverses;  // [64]
  int half, row;    // of O; rows `row` and `row + 8` are the lane's
  uint64_t k_descriptor, v_descriptor;
  Ring &ring, &before;  // of the next tile of K, and of that whose P V is next

  __device__ __forceinline__ Half(Fragments& f, Ring& ring, Ring& before, const Work& work, const Output& output)
      : Output(output), work(work), f(f), ring(ring), before(before) {}

  // Once the warpgroup has its registers.
  __device__ __forceinline__ void begin() {
    p_smem = work.smem_address + Smem::P;
    factors = reinterpret_cast<float*>(work.smem + Smem::FACTORS);
    inverses = reinterpret_cast<float*>(work.smem + Smem::INVERSES);
    half = work.warp / 4 - SCORES_ALONE, row = work.warp % 4 * 16 + work.lane / 4;
    k_descriptor = matrix_descriptor(work.smem_address + Smem::K, 0);
    v_descriptor = matrix_descriptor(work.smem_address + Smem::K + half * (HALF / 64) * BLOCK_N * 128, BLOCK_N * 128);
  }
  __device__ __forceinline__ uint64_t v_tile(const Ring& at) const {
    return v_descriptor + descriptor_step(Smem::K_TILE_BYTES) * at.stage;
  }
  __device__ __forceinline__ void release(const Ring& at) {  // this warp has used the tile of K
    if (work.lane == 0) mbarrier_arrive(work.k_empty(at));
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) f.o[i] = 0.f;
  }
  // Of P in shared memory.
  __device__ __forceinline__ void take_scores() {
    OtherP p;
    int p_tile = 0;
    for (int tile = work.last_tile; tile >= work.first_tile; --tile) {
      mbarrier_wait(work.k_full(ring), ring.parity);  // visible to this warpgroup too
      named_barrier_sync<CONSUMERS>(P_READY + p_tile);
      if (tile < work.last_tile) {
        const float factor[2] = {factors[p_tile * 64 + row], factors[p_tile * 64 + row + 8]};
        if (__any_sync(ALL_LANES, factor[0] != 1.f || factor[1] != 1.f)) scale_rows(f.o, factor);
      }
      // Then there is another tile for this place.
      auto free_p = [&] {
        if (tile > work.first_tile + P_TILES - 1) named_barrier_arrive<CONSUMERS>(P_FREE + p_tile);
      };
      p.load(p_tile, p_smem, work.warp % 4, work.lane);
      if constexpr (SCORES_ALONE) free_p();
      multiply_pv(f.o, p, v_tile(ring));
      wgmma_wait<0>();
      pin_registers(f.o);
      if constexpr (!SCORES_ALONE) free_p();
      p_tile = (p_tile + 1) % P_TILES;
      release(ring);
      ring.advance();
    }
    if (work.splits == 1) {
      named_barrier_sync<CONSUMERS>(ROWS_DONE);
      f.inverse[0] = inverses[row], f.inverse[1] = inverses[row + 8];
    }
  }
  __device__ __forceinline__ void store() {
    if (work.splits > 1) {
      float* row_gmem = partial_gmem + (work.result() * 64 + row) * VALUE_DIM + half * HALF + work.lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < HALF / 2; i += 4) {
        *reinterpret_cast<float2*>(row_gmem + i * 2) = make_float2(f.o[i], f.o[i + 1]);
        *reinterpret_cast<float2*>(row_gmem + 8 * VALUE_DIM + i * 2) = make_float2(f.o[i + 2], f.o[i + 3]);
      }
      return;
    }
    // Over rows of Q that only this warp and its neighbour in the first warpgroup have multiplied, all of which is
    // done.
    const int o_offset = half * (HALF / 64) * 64 * 128, warp_row = work.warp % 4 * 16;
    output_to_shared<Element>(f.o, f.inverse, work.smem_address + o_offset, work.warp % 4, work.lane);
    __syncwarp();  // all rows of the warp are written
    Element* row_gmem =
        o_gmem + work.batch * o_batch_stride + work.query * o_row_stride + (work.first_head + warp_row) * o_head_stride;
    rows_to_global<HALF>(work.smem + o_offset, row_gmem + half * HALF, o_head_stride, work.heads - warp_row,
                         work.warp % 4, work.lane);
  }
};
