// cache_operands.cuh: K and V of 8 bits under queries of 16: a cache. Tensor maps bring them, as columns of 16 bits, to
// rings of their own; three warps beside the one that copies make fp16 of each tile, exactly, as products take it. K is
// multiplied as it comes where Q is a sum of two numbers of 8 bits.
#include "device/copy/ring_position.cuh"
#include "device/copy/tensor_tile.cuh"
#include "device/ptx/e4m3.cuh"
#include "device/ptx/eight_bits.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/largest2.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/shared_words.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warp.cuh"
#include "flash_wgmma/head_scales.cuh"
#include "flash_wgmma/given_rows.cuh"
#include "flash_wgmma/made_rows.cuh"
#include "flash_wgmma/operands.cuh"

enum class Queries { FP16, HALVED, SPLIT };  // as they are; fp16 (`HalfRows`); two numbers of 8 bits (`SplitRows`)

template <class KvElement, int HEAD_DIM, int VALUE_DIM, int BLOCK_N, int STAGES, Queries QUERIES>
struct CacheOperands : SixteenBitOperands<Fp16, HEAD_DIM, VALUE_DIM, BLOCK_N> {
  static constexpr bool CONVERTS = QUERIES != Queries::SPLIT, MAKES_ROWS = QUERIES != Queries::FP16;
  static constexpr bool LEVELS = QUERIES == Queries::SPLIT;
  static constexpr int ROW_COLUMNS = CONVERTS ? HEAD_DIM : HEAD_DIM / 2;
  static constexpr int TRANSPOSERS = 3, MAKERS = 32 * TRANSPOSERS;
  using LoadedKeys = TensorTile<HEAD_DIM / 2>;
  using LoadedTiles = TensorTile<VALUE_DIM / 2>;

  // What the warps after the first of the producer's warpgroup do: all see each tile that comes, of K that CONVERTS,
  // then of V, and each converts every third, as one costs waits and fences, however few its numbers are. A word says
  // that no more will come.
  template <class Smem, class Block> static __device__ __forceinline__ void transpose(const Block& block) {
    int turn = block.warp % 4 - 1;  // tiles until this warp's next
    RingPosition<STAGES> ring;
    for (;; ring.advance()) {
      mbarrier_wait(block.barrier(CONVERTS ? Smem::KEYS_LOADED_FULL : Smem::LOADED_FULL, ring.stage), ring.parity);
      int last[1];
      read_shared_words(block.smem_address + Smem::LAST + 4 * ring.stage, block.lane, last);
      if (last[0]) break;
      if constexpr (CONVERTS) {
        mbarrier_wait(block.barrier(Smem::K_EMPTY, ring.stage), ring.parity ^ 1);
        if (turn == 0)
          convert<HEAD_DIM>(block.smem + Smem::LOADED_KEYS + ring.stage * LoadedKeys::bytes(BLOCK_N),
                            block.smem + Smem::K + ring.stage * Smem::K_TILE_BYTES, block.lane);
        tell(block.barrier(Smem::K_FULL, ring.stage), block.barrier(Smem::KEYS_LOADED_EMPTY, ring.stage), block.lane);
        turn = turn == 0 ? TRANSPOSERS - 1 : turn - 1;
        mbarrier_wait(block.barrier(Smem::LOADED_FULL, ring.stage), ring.parity);
      }
      mbarrier_wait(block.barrier(Smem::V_EMPTY, ring.stage), ring.parity ^ 1);
      if (turn == 0)
        convert<VALUE_DIM>(block.smem + Smem::LOADED + ring.stage * Smem::LOADED_TILE_BYTES,
                           block.smem + Smem::V + ring.stage * Smem::V_TILE_BYTES, block.lane);
      tell(block.barrier(Smem::V_FULL, ring.stage), block.barrier(Smem::LOADED_EMPTY, ring.stage), block.lane);
      turn = turn == 0 ? TRANSPOSERS - 1 : turn - 1;
    }
  }

private:
  static __device__ __forceinline__ void tell(uint32_t full_smem, uint32_t empty_smem, int lane) {
    mbarrier_arrive(full_smem);  // each lane: the next numbers in this place are another warp's
    __syncwarp();                // all lanes have read when one says so for the warp
    if (lane == 0) mbarrier_arrive(empty_smem);
  }
  // A tile, 8 rows of 64 columns at a time: a lane has a row's 16, and eight lanes eight rows,
  // whose pieces of 16 bytes the swizzle puts into different banks. Addresses are a lane's own and constants.
  template <int COLUMNS>
  static __device__ __forceinline__ void convert(const unsigned char* from, unsigned char* to, int lane) {
    constexpr int PIECES = COLUMNS / 16, ACROSS = (PIECES + 3) / 4, EIGHTS = BLOCK_N / 8;
    constexpr int ROWS_AT_ONCE = ACROSS < 3 ? 2 : 1, UNITS = ROWS_AT_ONCE * ACROSS;
    const int row = lane % 8, piece = lane / 8;
    from += row * 128, to += row * 128;
    const int from_piece = (piece ^ row) * 16, to_piece = (2 * piece ^ row) * 16;
    auto has = [&](int across) { return PIECES % 4 == 0 || across * 4 + piece < PIECES; };
    static_assert(EIGHTS % ROWS_AT_ONCE == 0, "whole steps");
#pragma unroll 1
    for (int first = 0; first < EIGHTS; first += ROWS_AT_ONCE) {
      uint4 given[UNITS];
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        const int across = i % ACROSS, eight = i / ACROSS;
        if (has(across))
          given[i] = *reinterpret_cast<const uint4*>(from + (first + eight) * 1024 + across / 2 * BLOCK_N * 128 +
                                                     (from_piece ^ across % 2 * 64));
      }
#pragma unroll
      for (int i = 0; i < UNITS; ++i) {
        const int across = i % ACROSS, eight = i / ACROSS;
        if (!has(across)) continue;
        uint4 low, high;
        to_halves<KvElement>(given[i].x, low.x, low.y), to_halves<KvElement>(given[i].y, low.z, low.w);
        to_halves<KvElement>(given[i].z, high.x, high.y), to_halves<KvElement>(given[i].w, high.z, high.w);
        unsigned char* place = to + (first + eight) * 1024 + across * BLOCK_N * 128;
        *reinterpret_cast<uint4*>(place + to_piece) = low;
        *reinterpret_cast<uint4*>(place + (to_piece ^ 16)) = high;
      }
    }
    fence_proxy_async();  // the products see what was written, and the next copy comes after what was read
  }
};

// Rows of Q in another element, of each warp times a power of two that brings its largest number near the end of fp16,
// which `round` gives back.
template <class Wide, int HEAD_DIM, bool IN_REGISTERS> struct HalfRows : MadeRows<2 * HEAD_DIM, IN_REGISTERS> {
  using Made = MadeRows<2 * HEAD_DIM, IN_REGISTERS>;
  template <typename Meet>
  __device__ __forceinline__ float round(unsigned char* tile, uint32_t tile_smem, int thread, Meet meet) {
    forget_origin(thread);
    const int lane = thread % 32;
    typename Made::Own own;
    auto& made = this->registers(own);
    uint32_t most = 0, finite = 0;
#pragma unroll
    for (int i = 0; i < 4 * Made::STEPS; ++i) {
      if (i % 4 == 0) RowOperand<HEAD_DIM, false>::fragment(made[i / 4], i / 4, tile_smem, thread / 32, lane);
      most = larger2(most, made[i / 4][i % 4], Wide{});
    }
    float size = largest(most);
    if (!is_finite(size)) {  // of all lanes: infinities count for no scale
#pragma unroll
      for (int i = 0; i < 4 * Made::STEPS; ++i)
        finite = larger2(finite, without_infinities<Wide>(made[i / 4][i % 4]), Wide{});
      size = largest(finite);
    }
    const PowerOfTwo unit(size);
#pragma unroll
    for (int i = 0; i < 4 * Made::STEPS; ++i) {
      float low, high;
      unpack2(made[i / 4][i % 4], Wide{}, low, high);
      made[i / 4][i % 4] = pack2<Fp16>(low * unit.factor, high * unit.factor);
    }
    this->keep(own, tile, tile_smem, thread / 32 * 16 + lane / 4, lane, meet);
    return unit.inverse;
  }

private:
  // Of the warp. Floats from 0 on have the order of their bits.
  static __device__ __forceinline__ float largest(uint32_t sizes) {
    float low, high;
    unpack2(sizes, Wide{}, low, high);
    return __uint_as_float(warp_max(__float_as_uint(fmaxf(low, high))));
  }
};

// Rows of Q as sums of two numbers of e4m3, all first ones before all second ones, of each warp times a power of two
// that brings its largest number near 2^8, which `round` gives back. The eight digits of a bf16 are those of two such
// numbers: sums are exact from 2^-9 of the largest on, and elsewhere within 2^-17 of it. Rows that are FAR octaves
// smaller, or more, have powers of their own, and their scores are lowered: one row of padding would be the end of 15.
template <class Wide, int HEAD_DIM, bool IN_REGISTERS>
struct SplitRows : MadeRows<2 * ((HEAD_DIM + 31) / 32 * 32), IN_REGISTERS> {
  using Made = MadeRows<2 * ((HEAD_DIM + 31) / 32 * 32), IN_REGISTERS>;
  static constexpr int HALF = Made::STEPS / 2, FAR = 5, MOST = 126;
  uint32_t apart;  // by how many octaves row g is raised; from bit 8 on row g + 8

  // Scores of all rows as if they had the warp's power.
  template <int FLOATS> __device__ __forceinline__ void level(float (&s)[FLOATS]) const {
    if (!__any_sync(ALL_LANES, apart != 0)) return;
    const float lower[2] = {__uint_as_float((127 - (apart & 0xff)) << 23),
                            __uint_as_float((127 - (apart >> 8 & 0xff)) << 23)};
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) s[i] *= lower[i / 2 % 2];
  }
  template <typename Meet>
  __device__ __forceinline__ float round(unsigned char* tile, uint32_t tile_smem, int thread, Meet meet) {
    forget_origin(thread);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    GivenRows<Wide, HALF> given;
    given.load(tile, row, lane);
    float size[2], factor[2];
    const PowerOfTwo<7> unit(given.size(size));
    apart = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      size[i] = fmaxf(size[i], __shfl_xor_sync(ALL_LANES, size[i], 1));
      size[i] = fmaxf(size[i], __shfl_xor_sync(ALL_LANES, size[i], 2));
      const uint32_t of_warp = __float_as_uint(unit.factor);
      const uint32_t smaller = (__float_as_uint(PowerOfTwo<7>(size[i]).factor) - of_warp) >> 23;
      const uint32_t octaves = smaller < FAR ? 0 : min(smaller, uint32_t(MOST));
      factor[i] = __uint_as_float(of_warp + (octaves << 23)), apart |= octaves << 8 * i;
    }
    typename Made::Own own;
    auto& made = this->registers(own);
#pragma unroll
    for (int i = 0; i < 4 * HALF; ++i) {
      float x[4], first[4];
      given.four(i, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] *= factor[i % 2];
      const uint32_t four = pack4_e4m3(x[0], x[1], x[2], x[3]);
      uint32_t low, high;
      to_halves<E4m3>(four, low, high);
      unpack2(low, Fp16{}, first[0], first[1]), unpack2(high, Fp16{}, first[2], first[3]);
      made[i / 4][i % 4] = four;
      made[HALF + i / 4][i % 4] = pack4_e4m3(x[0] - first[0], x[1] - first[1], x[2] - first[2], x[3] - first[3]);
    }
    this->keep(own, tile, tile_smem, row, lane, meet);
    return unit.inverse;
  }
};

template <class Wide, int HEAD_DIM, bool IN_REGISTERS, Queries QUERIES> struct CacheRows {
  using Type = RowOperand<HEAD_DIM, IN_REGISTERS>;
};
template <class Wide, int HEAD_DIM, bool IN_REGISTERS> struct CacheRows<Wide, HEAD_DIM, IN_REGISTERS, Queries::HALVED> {
  using Type = HalfRows<Wide, HEAD_DIM, IN_REGISTERS>;
};
template <class Wide, int HEAD_DIM, bool IN_REGISTERS> struct CacheRows<Wide, HEAD_DIM, IN_REGISTERS, Queries::SPLIT> {
  using Type = SplitRows<Wide, HEAD_DIM, IN_REGISTERS>;
};

// Of heads, or OF_KEYS, whose parts in scores and weights consumers have (`key_scales.cuh`).
template <bool OF_KEYS> struct CacheScales {
  static constexpr bool GIVEN = true, BY_BLOCK = false, BY_KEY = OF_KEYS;
  using Running = NoBlockScales;
  using Ahead = NoScalesAhead;
  HeadScales k, v;
  __device__ __forceinline__ float of_scores(int batch, int kv_head) const {
    return BY_KEY ? 1.f : k.of(batch, kv_head);
  }
  __device__ __forceinline__ float of_values(int batch, int kv_head) const {
    return BY_KEY ? 1.f : v.of(batch, kv_head);
  }
};

// What K and V of KvElement make of the parts under a Q of Element, which is a sum of two numbers if it SPLITS.
template <class Element, class KvElement, bool BY_KEY, bool SPLITS> struct KvTypes {
  static constexpr Queries QUERIES = SPLITS                           ? Queries::SPLIT
                                     : SameType<Element, Fp16>::VALUE ? Queries::FP16
                                                                      : Queries::HALVED;
  template <int HEAD_DIM, int VALUE_DIM, int BLOCK_N, int STAGES, int LANE_ROWS>
  using Operands = CacheOperands<KvElement, HEAD_DIM, VALUE_DIM, BLOCK_N, STAGES, QUERIES>;
  template <int HEAD_DIM, bool IN_REGISTERS>
  using Rows = typename CacheRows<Element, HEAD_DIM, IN_REGISTERS, QUERIES>::Type;
  using Scales = CacheScales<BY_KEY>;
};
template <class Element, bool BY_KEY> struct KvTypes<Element, Element, BY_KEY, false> {
  template <int HEAD_DIM, int VALUE_DIM, int BLOCK_N, int STAGES, int LANE_ROWS>
  using Operands = SixteenBitOperands<Element, HEAD_DIM, VALUE_DIM, BLOCK_N, LANE_ROWS>;
  template <int HEAD_DIM, bool IN_REGISTERS> using Rows = RowOperand<HEAD_DIM, IN_REGISTERS>;
  using Scales = NoScales;
};
