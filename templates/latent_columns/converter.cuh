// converter.cuh: a cache of 8 bits. The producer brings V in e4m3, and K's own columns, LOAD_KEYS keys at a time; a
// warpgroup makes tiles of K of them: V times its scales, one of each SCALE_COLUMNS columns of a key (FlashMLA's "FP8
// with scale"). What multiplies finds tiles as of 16 bits. Needs the constants of latent_columns.cu.j2.
#include "device/copy/vector.cuh"
#include "device/ptx/eight_bits.cuh"
#include "device/ptx/tma.cuh"
#include "latent_columns/key_shares.cuh"

struct Converter {
  static constexpr int GROUPS = VALUE_DIM / SCALE_COLUMNS, PARTS = BLOCK_N / LOAD_KEYS;
  static constexpr int ROWS = LOAD_KEYS / 2, EIGHTS = ROWS / 8;              // of a warp
  static constexpr int OWN_PIECES = LOAD_KEYS * (HEAD_DIM - VALUE_DIM) / 8;  // of 16 bytes, of K's own columns
  static_assert(GROUPS <= 4 && (!EIGHT_BITS || CONVERTERS == 256),
                "a warp has the columns of a scale, of half of the rows");
  KeyShares& shares;
  const int warp, lane, group, first_row;
  RingPosition<STAGES> k_place;
  RingPosition<LOADED> place;

  __device__ __forceinline__ explicit Converter(KeyShares& shares)
      : shares(shares),
        warp(shares.warp - FIRST_CONVERTER),
        lane(shares.lane),
        group(warp % 4),
        first_row(warp / 4 * ROWS) {}

  __device__ __forceinline__ void run() {
    while (shares.next()) {
#pragma unroll 1
      for (int i = shares.end_tile - 1; i >= shares.first_tile; --i) {
        mbarrier_wait(shares.barrier(Smem::K_EMPTY, k_place.stage), k_place.parity ^ 1);
        unsigned char* tile = shares.smem + Smem::K + k_place.stage * Smem::K_TILE_BYTES;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) convert(tile + part * LOAD_KEYS * 128);
        if (lane == 0) mbarrier_arrive(shares.barrier(Smem::K_FULL, k_place.stage));
        k_place.advance();
      }
    }
  }

  // The next keys that have come, to rows of the tile from `to` on. Eight lanes have eight rows, whose pieces of 16
  // bytes the swizzle puts into different banks.
  __device__ __forceinline__ void convert(unsigned char* to) {
    mbarrier_wait(shares.barrier(Smem::LOADED_FULL, place.stage), place.parity);
    const unsigned char* from = shares.smem + Smem::LOADED_TILES + place.stage * Smem::LOADED_BYTES;
    const float* scales = reinterpret_cast<float*>(shares.smem + Smem::SCALES) + place.stage * LOAD_KEYS * 4 + group;
    if (group < GROUPS) {
#pragma unroll
      for (int i = 0; i < 2 * EIGHTS; ++i) {
        const int row = first_row + i % EIGHTS * 8 + lane % 8, piece = i / EIGHTS * 4 + lane / 8;  // of 16 columns
        const uint4 four = *reinterpret_cast<const uint4*>(from + place_of(group * LOAD_KEYS + row, piece));
        unsigned char* chunk = to + (group * 2 + piece / 4) * BLOCK_N * 128;
        const float of_row = scales[row * 4];
        *reinterpret_cast<uint4*>(chunk + place_of(row, piece % 4 * 2)) = scaled(four.x, four.y, of_row);
        *reinterpret_cast<uint4*>(chunk + place_of(row, piece % 4 * 2 + 1)) = scaled(four.z, four.w, of_row);
      }
    }
#pragma unroll
    for (int i = warp * 32 + lane; i < OWN_PIECES; i += 256) {
      const int row = i % 8 + i / 64 % (LOAD_KEYS / 8) * 8, piece = i / 8 % 8, chunk = i / (8 * LOAD_KEYS);
      *reinterpret_cast<uint4*>(to + (VALUE_DIM / 64 + chunk) * BLOCK_N * 128 + place_of(row, piece)) =
          *reinterpret_cast<const uint4*>(from + place_of((GROUPS + chunk) * LOAD_KEYS + row, piece));
    }
    fence_proxy_async();  // the products see what was written, and the next copy comes after what was read
    __syncwarp();         // all lanes have written when one says for the warp that a tile of K is there
    mbarrier_arrive(shares.barrier(Smem::LOADED_EMPTY, place.stage));  // each lane: as `copy_scales`
    place.advance();
  }
  // In rows of 128 bytes with the 128-byte swizzle.
  static __device__ __forceinline__ int place_of(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }
  static __device__ __forceinline__ uint4 scaled(uint32_t low, uint32_t high, float scale) {
    uint32_t halves[4], made[4];
    to_halves<E4m3>(low, halves[0], halves[1]), to_halves<E4m3>(high, halves[2], halves[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float first, second;
      unpack2(halves[i], Fp16{}, first, second);
      made[i] = pack2<Element>(first * scale, second * scale);
    }
    return make_uint4(made[0], made[1], made[2], made[3]);
  }
};
