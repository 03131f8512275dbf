// consumer.cuh: the warpgroup that multiplies: scores, the softmax, O and its way out. Of products of 64 rows and
// BLOCK_M columns, d[i] of a lane with g = lane / 4 is row g + 8 (i / 2 % 2) of its warp's 16 rows, column i / 4 * 8 +
// lane % 4 * 2 + i % 2 (PTX ISA, wgmma m64nNk16, D): of scores a row is a key, of Oᵀ a column of O, and a column is a
// row of Q. Needs the constants of latent_columns.cu.j2.
#include "device/ptx/exp2.cuh"
#include "device/ptx/tma.cuh"
#include "device/softmax/log_sum.cuh"
#include "latent_columns/key_shares.cuh"

struct Output {
  Element* o_gmem;
  float* lse_gmem;
  float* partial_gmem;
  float2* state_gmem;
  int2* sharers_gmem;
  int64_t batch_stride, head_stride, row_stride;
};

struct Consumer {
  static constexpr int FLOATS = BLOCK_M / 2, CHUNKS = VALUE_DIM / 64;  // of a lane; of 64 rows of Oᵀ
  static constexpr int COLUMNS = BLOCK_M / 4;                          // of a lane, two behind one another
  static constexpr int WARPS_DONE = 1, P_READY = 2;                    // named barriers
  KeyShares& shares;
  const Output& output;
  const float softmax_scale_log2;
  const int warp, lane;
  float s[FLOATS], o[CHUNKS][FLOATS];
  float shift[COLUMNS], sum[COLUMNS];  // of columns: log2 units, the maximum so far; Σ 2^(s - shift) of the lane's rows
  int first_tile, end_tile, keys, first_keys;  // of the tile of rows at hand: keys of its last query and its first
  RingPosition<Q_STAGES> q_place;
  RingPosition<STAGES> k_place;

  __device__ __forceinline__ Consumer(KeyShares& shares, const Output& output, float softmax_scale_log2)
      : shares(shares), output(output), softmax_scale_log2(softmax_scale_log2), warp(shares.warp), lane(shares.lane) {}

  __device__ __forceinline__ void run() {
    while (same(shares.next())) {
      first_tile = same(shares.first_tile), end_tile = same(shares.end_tile);
      keys = same(shares.keys), first_keys = same(shares.first_keys);
      mbarrier_wait(shares.barrier(Smem::Q_FULL, q_place.stage), q_place.parity);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < FLOATS; ++i) o[chunk][i] = 0.f;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) shift[i] = NO_KEY, sum[i] = 0.f;
      take_keys();
      finish();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shares.barrier(Smem::Q_EMPTY, q_place.stage));
      q_place.advance();
    }
  }

  // By a shuffle: uniform to the compiler, which would wait at a branch around a product that may diverge.
  static __device__ __forceinline__ int same(int x) { return __shfl_sync(ALL_LANES, x, 0); }
  // Which of the lane's columns an element is of, and which of the tile's a column is.
  static constexpr __device__ __forceinline__ int column_of(int i) { return i / 4 * 2 + i % 2; }
  __device__ __forceinline__ int row_of(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }

  __device__ __forceinline__ uint32_t q_smem() const {
    return shares.smem_address + q_place.stage * Smem::Q_TILE_BYTES;
  }
  __device__ __forceinline__ uint32_t k_smem() const {
    return shares.smem_address + Smem::K + k_place.stage * Smem::K_TILE_BYTES;
  }
  __device__ __forceinline__ float* of_warp(int of) const {
    return reinterpret_cast<float*>(shares.smem + Smem::WARPS) + of * BLOCK_M;
  }

  // Sᵀ = K Qᵀ, as soon as the tile of K is there.
  __device__ __forceinline__ void multiply_kq() {
    mbarrier_wait(shares.barrier(Smem::K_FULL, k_place.stage), k_place.parity);
    const uint64_t k = matrix_descriptor(k_smem(), 0), q = matrix_descriptor(q_smem(), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tiles::DIM_STEPS; ++step) {
      wgmma_kq(s, k + descriptor_step(Tiles::step_offset(step, BLOCK_N)),
               q + descriptor_step(Tiles::step_offset(step, BLOCK_M)), step > 0);
    }
    wgmma_commit();
  }
  // Oᵀ += Vᵀ Pᵀ
  __device__ __forceinline__ void multiply_vp() {
    const uint64_t v = matrix_descriptor(k_smem(), BLOCK_N * 128);
    const uint64_t p = matrix_descriptor(shares.smem_address + Smem::P, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        wgmma_vp(o[chunk], v + descriptor_step(chunk * BLOCK_N * 128 + step * 16 * 128), p + descriptor_step(step * 32),
                 true);
      }
    wgmma_commit();
  }

  // 16 columns and a warp's 16 rows, turned round: into a tile of rows of 64 elements with the 128-byte swizzle.
  template <class Value> __device__ __forceinline__ void store_turned(uint32_t tile_smem, Value value) const {
#pragma unroll
    for (int i = 0; i < FLOATS; i += 8) {
      const int row = i * 2 + lane / 16 * 8 + lane % 8, column = (warp * 2 + lane / 8 % 2) ^ (row % 8);
      stmatrix_x4_trans(tile_smem + row * 128 + column * 16, pack2<Element>(value(i), value(i + 1)),
                        pack2<Element>(value(i + 2), value(i + 3)), pack2<Element>(value(i + 4), value(i + 5)),
                        pack2<Element>(value(i + 6), value(i + 7)));
    }
  }
  // A number of each of the lane's columns, of all rows: `combine` of those of lanes, then of warps.
  template <class Combine> __device__ __forceinline__ void over_rows(float (&x)[COLUMNS], Combine combine) const {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x[i] = combine(x[i], __shfl_xor_sync(ALL_LANES, x[i], step));
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) of_warp(warp)[row_of(i)] = x[i];
    }
    named_barrier_sync<CONSUMERS>(WARPS_DONE);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      x[i] = combine(combine(of_warp(0)[row_of(i)], of_warp(1)[row_of(i)]),
                     combine(of_warp(2)[row_of(i)], of_warp(3)[row_of(i)]));
    }
  }

  // P of these scores of the tile of keys from `first_key` on, into shared memory; O follows the shift.
  __device__ __forceinline__ void softmax(int first_key) {
    const int first = first_key + warp * 16 + lane / 4;  // the lane's
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) s[i] *= softmax_scale_log2;
    if (first_key + BLOCK_N > first_keys) {
#pragma unroll
      for (int i = 0; i < FLOATS; ++i) {
        const int seen = CAUSAL && QUERIES > 1 ? min(keys, first_keys + row_of(column_of(i)) / HEADS) : keys;
        if (first + i / 2 % 2 * 8 >= seen) s[i] = NEGATIVE_INFINITY;
      }
    }
    float most[COLUMNS], factor[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int at = i / 2 * 4 + i % 2;
      most[i] = fmaxf(s[at], s[at + 2]);
    }
    over_rows(most, [](float a, float b) { return fmaxf(a, b); });
    bool rises = false;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const float higher = fmaxf(shift[i], most[i]);
      rises |= higher > shift[i];
      factor[i] = exp2_approx(shift[i] - higher), shift[i] = higher;
    }
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) s[i] = exp2_approx(s[i] - shift[column_of(i)]);
    store_turned(shares.smem_address + Smem::P, [&](int i) { return s[i]; });
    fence_proxy_async();  // wgmma reads it there
    if (__any_sync(ALL_LANES, rises)) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) sum[i] *= factor[i];
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < FLOATS; ++i) o[chunk][i] *= factor[column_of(i)];
    }
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) sum[column_of(i)] += s[i];
    named_barrier_sync<CONSUMERS>(P_READY);
  }

  // All of this block's keys of the tile of rows at hand, from the last to the first. Scores of the next tile are not
  // made ahead: its place in the ring would be waited for while this one's is held.
  __device__ __forceinline__ void take_keys() {
#pragma unroll 1
    for (int tile = end_tile - 1; tile >= first_tile; --tile) {
      multiply_kq();
      wgmma_wait<0>();
      pin_registers(s);
      softmax(tile * BLOCK_N);
      multiply_vp();
      wgmma_wait<0>();
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) pin_registers(o[chunk]);
      if (lane == 0) mbarrier_arrive(shares.barrier(Smem::K_EMPTY, k_place.stage));
      k_place.advance();
    }
  }

  // O of the tile of rows at hand to global memory, unfinished where other blocks have others of its keys.
  __device__ __forceinline__ void finish() {
    const RowTile& tile = shares.tile;
    over_rows(sum, [](float a, float b) { return a + b; });
    const int sharers = shares.first_tile > 0 ? 0 : shares.sharers();
    if (sharers && threadIdx.x == 0) output.sharers_gmem[shares.index] = make_int2(blockIdx.x, sharers);
    if (shares.shared) {
      leave(2 * blockIdx.x + (sharers > 0));
      named_barrier_sync<CONSUMERS>(P_READY);  // all warps have read the sums, in whose place come the next maxima
      return;
    }
    float inverse[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) inverse[i] = sum[i] > 0.f ? __fdividef(1.f, sum[i]) : 0.f;
    if constexpr (WRITE_LSE) {
      const int64_t head = int64_t(tile.batch) * shares.kv_heads * shares.group_heads + tile.first_head;
      if (warp == 0 && lane < 4) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          const int row = row_of(i);
          if (tile.has(row))
            output.lse_gmem[(head + row % HEADS) * shares.seqlen_q + tile.query + row / HEADS] =
                log_sum(shift[i], sum[i]);
        }
      }
    }
    // In the place of Q, which all warps' products have read.
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
      store_turned(q_smem() + chunk * BLOCK_M * 128, [&](int i) { return o[chunk][i] * inverse[column_of(i)]; });
    named_barrier_sync<CONSUMERS>(P_READY);
    constexpr int PIECES = VALUE_DIM / 8;  // of 16 bytes, a row
    const unsigned char* o_tile = shares.smem + q_place.stage * Smem::Q_TILE_BYTES;
    Element* row_gmem = output.o_gmem + tile.batch * output.batch_stride + tile.query * output.row_stride +
                        tile.first_head * output.head_stride;
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_M * PIECES; i += CONSUMERS) {
      const int row = i / PIECES, piece = i % PIECES;
      const int offset = piece / 8 * BLOCK_M * 128 + row * 128 + (piece % 8 ^ row % 8) * 16;
      if (tile.has(row)) {
        *reinterpret_cast<uint4*>(row_gmem + row % HEADS * output.head_stride + row / HEADS * output.row_stride +
                                  piece * 8) = *reinterpret_cast<const uint4*>(o_tile + offset);
      }
    }
    fence_proxy_async();  // before the next Q comes there
  }
  // As a result for latent_columns_merge.
  __device__ __forceinline__ void leave(int result) const {
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i)
        output.state_gmem[int64_t(result) * BLOCK_M + row_of(i)] = make_float2(shift[i], sum[i]);
    }
    float* lane_gmem = output.partial_gmem + int64_t(result) * BLOCK_M * VALUE_DIM + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) {
      const int row = row_of(column_of(i));
      if (shares.tile.has(row)) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
          lane_gmem[row * VALUE_DIM + chunk * 64 + i / 2 % 2 * 8] = o[chunk][i];
      }
    }
  }
};
