// blocks.cuh: a block of rows takes the tiles of the blocks of keys that two lists name, as FlexAttention's `BlockMask`
// has them. In PARTIAL blocks a key is seen if the mask and a predicate show it, in FULL ones in any case. Tiles of
// rows and of keys are parts of a block. Where many heads share a costly predicate, a launch of its own asks it once
// (`pack_mask`), and the heads read its answers, a bit each.
#include "device/mask.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/warp.cuh"

// What lies in memory. Lists are rows of `key_blocks` numbers of blocks, of which the first count.
struct KeyList {
  static constexpr bool LISTED = true;
  const int *partial_counts, *partial_blocks, *full_counts, *full_blocks;  // [lists, blocks of rows(, key_blocks)]
  int block_rows, block_keys, key_blocks;
  int64_t batch_stride, head_stride;  // lists; 0 where it is the same for all
  // [bits, whole blocks of rows, bits_row_words]: which keys of PARTIAL blocks are seen, of the first blocks of a list
  // in its order; or [bits, whole blocks of keys, bits_row_words]: which queries see them. May be null.
  uint32_t* bits;
  int64_t bits_batch_stride, bits_head_stride;  // words; 0 where it is the same for all
  int bits_row_words;

  static __device__ __forceinline__ void wait_for_bits() { grid_dependency_wait(); }
};

// What the predicate says of a row and a key; BY_KEYS: of a key and a query.
template <bool BY_KEYS, class Terms>
__device__ __forceinline__ bool shows(const Terms& terms, int batch, int head, int row, int key) {
  return BY_KEYS ? terms.shows(batch, head, key, row) : terms.shows(batch, head, row, key);
}

// Which keys of a PARTIAL tile ROWS rows of a lane see, from its first key on.
template <int ROWS, int BLOCK_N> struct SeenKeys {
  static constexpr int WORDS = (BLOCK_N + 31) / 32, WIDTH = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  uint32_t words[ROWS][WORDS];

  // `bits`: of the row's first key in the tile. `shift`: the lane's first key there, at most 6.
  __device__ __forceinline__ void load(int row, const uint32_t* bits, int first_bit, int shift) {
    if constexpr (BLOCK_N % 32 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += WIDTH) {
        if constexpr (WIDTH == 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(bits + i);
          words[row][i] = four.x, words[row][i + 1] = four.y, words[row][i + 2] = four.z, words[row][i + 3] = four.w;
        } else if constexpr (WIDTH == 2) {
          const uint2 two = *reinterpret_cast<const uint2*>(bits + i);
          words[row][i] = two.x, words[row][i + 1] = two.y;
        } else {
          words[row][i] = bits[i];
        }
      }
    } else {  // tiles begin at halves of words
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(bits) + first_bit / 16;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 16; ++i) {
        if (i % 2 == 0) words[row][i / 2] = halves[i];
        else words[row][i / 2] |= uint32_t(halves[i]) << 16;
      }
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[row][i] >>= shift;
  }
  // By the predicate, `row` and `key` being the lane's first: in a loop, which makes little code; words come in at the
  // end, as registers have no index that runs. BY_KEYS: rows are keys, and keys queries.
  template <bool BY_KEYS = false, class Terms>
  __device__ __forceinline__ void ask(const Terms& terms, int batch, int head, int row, int key) {
#pragma unroll 1
    for (int word = 0; word < WORDS; ++word) {
      uint32_t asked[ROWS] = {};
#pragma unroll 1
      for (int step = 0; step < (BLOCK_N < 32 ? BLOCK_N : 32); step += 8) {
        const int first = key + word * 32 + step;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const uint32_t low = shows<BY_KEYS>(terms, batch, head, row + i * 8, first),
                         high = shows<BY_KEYS>(terms, batch, head, row + i * 8, first + 1);
          asked[i] |= (low | high << 1) << step;
        }
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int other = 1; other < WORDS; ++other) words[i][other - 1] = words[i][other];
        words[i][WORDS - 1] = asked[i];
      }
    }
  }
  __device__ __forceinline__ void show_all() {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int word = 0; word < WORDS; ++word) words[i][word] = ~0u;
  }
  // Of those that are seen the `visible` ones, counted from the lane's first key on.
  template <class Keys> __device__ __forceinline__ void keep(const Keys& visible) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        words[i][word] &= first_bits(visible.of(i * 8) - word * 32);
        if constexpr (Keys::WINDOW) words[i][word] &= ~first_bits(visible.hidden_of(i * 8) - word * 32);
      }
  }
  static __device__ __forceinline__ uint32_t first_bits(int count) {
    return count <= 0 ? 0 : ~0u >> max(0, 32 - count);
  }
  // Of pairs of neighbours that begin at multiples of 8.
  __device__ __forceinline__ bool sees(int row, int step) const { return words[row][step / 32] >> step % 32 & 1; }
};

// The tiles of BLOCK_N keys that a tile of rows takes: those of PARTIAL blocks, then those of FULL ones.
template <int BLOCK_N> struct ListedTiles {
  const int *partial_blocks, *full_blocks;
  int block_keys, tiles_per_block, partial_tiles, tiles, packed_tiles;  // packed: the first ones of PARTIAL blocks
  const uint32_t* bits;                                                 // of query 0; null where the predicate is asked
  int bits_row_words;

  __device__ __forceinline__ ListedTiles(const KeyList& list, int batch, int head, int block_row)
      : block_keys(list.block_keys), tiles_per_block(list.block_keys / BLOCK_N) {
    const int64_t row = batch * list.batch_stride + head * list.head_stride + block_row / list.block_rows;
    partial_blocks = list.partial_blocks + row * list.key_blocks;
    full_blocks = list.full_blocks + row * list.key_blocks;
    partial_tiles = list.partial_counts[row] * tiles_per_block;
    tiles = partial_tiles + list.full_counts[row] * tiles_per_block;
    bits = list.bits ? list.bits + batch * list.bits_batch_stride + head * list.bits_head_stride : nullptr;
    bits_row_words = list.bits_row_words;
    packed_tiles = bits ? min(partial_tiles, bits_row_words / (block_keys / 32) * tiles_per_block) : 0;
  }
  __device__ __forceinline__ bool is_partial(int tile) const { return tile < partial_tiles; }
  // There are bits; of an empty list, whose tile is before the first, none.
  __device__ __forceinline__ bool is_packed(int tile) const { return uint32_t(tile) < uint32_t(packed_tiles); }
  // Whether keys of a tile may be hidden but for those behind the last: PARTIAL ones hide none where neither the mask
  // nor a predicate does.
  template <class Mask, class Terms> __device__ __forceinline__ bool may_hide(const Terms& terms, int tile) const {
    return (Mask::ROWS_DIFFER || decltype(terms.own)::SHOWS) && is_partial(tile);
  }
  // Whether a tile is PARTIAL, told to an expression of scores that hides what the predicate does not show.
  template <class Terms> __device__ __forceinline__ bool ask_predicate(Terms& terms, int tile) const {
    return terms.own.partial = is_partial(tile);
  }
  __device__ __forceinline__ int first_key(int tile) const {
    const int *blocks = is_partial(tile) ? partial_blocks : full_blocks,
              of_kind = tile - (is_partial(tile) ? 0 : partial_tiles);
    const int number = tiles_per_block == 1 ? of_kind : of_kind / tiles_per_block;
    return blocks[number] * block_keys + (of_kind - number * tiles_per_block) * BLOCK_N;
  }

  // Whether a block that is not masked in any case has places behind the last key: a FULL one, or a PARTIAL one that
  // hides nothing. A whole warp asks.
  template <class Mask, class Terms>
  __device__ __forceinline__ bool has_cut_block(const Terms& terms, int seqlen_k, int lane) const {
    if (seqlen_k % block_keys == 0) return false;  // lists need not be read
    const int partial = partial_tiles / tiles_per_block, blocks = tiles / tiles_per_block;
    const int first = Mask::ROWS_DIFFER || decltype(terms.own)::SHOWS ? partial : 0;
    bool found = false;
    for (int i = first + lane; i < blocks; i += 32)
      found |= ((i < partial ? partial_blocks[i] : full_blocks[i - partial]) + 1) * block_keys > seqlen_k;
    return __any_sync(ALL_LANES, found);
  }

  // The same, counted down: from `tiles` - 1 FULL blocks first, in each the first keys first, then PARTIAL ones. Where
  // the lists name none, key 0.
  __device__ __forceinline__ int first_key_down(int tile) const { return tiles == 0 ? 0 : first_key(up(tile)); }
  // The place of such a tile, counted up.
  __device__ __forceinline__ int up(int tile) const {
    return is_partial(tile) ? partial_tiles - 1 - tile : tiles - 1 - (tile - partial_tiles);
  }

  // Of the rows `row`, `row` + 8 and so on of a lane, in a tile that is packed.
  template <int ROWS>
  __device__ __forceinline__ void load_seen(SeenKeys<ROWS, BLOCK_N>& seen, int row, int tile, int lane) const {
    const int first = tile * BLOCK_N;  // blocks lie next to one another
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      seen.load(i, bits + int64_t(row + i * 8) * bits_row_words + first / 32, first % 32, lane % 4 * 2);
    }
  }
  // s = -inf for keys that are not seen.
  template <int FLOATS>
  static __device__ __forceinline__ void mask_unseen(float (&s)[FLOATS], const SeenKeys<2, BLOCK_N>& seen) {
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) {
      if (!seen.sees(i / 2 % 2, i / 4 * 8 + i % 2)) s[i] = NEGATIVE_INFINITY;
    }
  }
  template <int ROW_TILES, int KEY_TILES>
  static __device__ __forceinline__ void mask_unseen(float (&s)[ROW_TILES][KEY_TILES][4],
                                                     const SeenKeys<2 * ROW_TILES, BLOCK_N>& seen) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!seen.sees(2 * m + j / 2, n * 8 + j % 2)) s[m][n][j] = NEGATIVE_INFINITY;
        }
  }

  // s = -inf for keys that the predicate hides. `row` and `key` are this lane's first; of those past the last it may
  // say anything. BY_KEYS: rows are keys, and keys queries.
  template <bool BY_KEYS = false, class Terms, int FLOATS>  // wgmma's accumulators
  static __device__ __forceinline__ void mask_partial(float (&s)[FLOATS], const Terms& terms, int batch, int head,
                                                      int row, int key) {
    if constexpr (!decltype(terms.own)::SHOWS) return;
    if constexpr (decltype(terms.own)::IN_LOOP) {
      SeenKeys<2, BLOCK_N> seen;
      seen.template ask<BY_KEYS>(terms, batch, head, row, key);
      return mask_unseen(s, seen);
    }
#pragma unroll
    for (int i = 0; i < FLOATS; i += 4)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!shows<BY_KEYS>(terms, batch, head, row + j / 2 * 8, key + i * 2 + j % 2)) s[i + j] = NEGATIVE_INFINITY;
      }
  }
  template <class Terms, int ROW_TILES, int KEY_TILES>  // those of mma
  static __device__ __forceinline__ void mask_partial(float (&s)[ROW_TILES][KEY_TILES][4], const Terms& terms,
                                                      int batch, int head, int row, int key) {
    if constexpr (!decltype(terms.own)::SHOWS) return;
    if constexpr (decltype(terms.own)::IN_LOOP) {
      SeenKeys<2 * ROW_TILES, BLOCK_N> seen;
      seen.ask(terms, batch, head, row, key);
      return mask_unseen(s, seen);
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!terms.shows(batch, head, row + m * 16 + j / 2 * 8, key + n * 8 + j % 2)) s[m][n][j] = NEGATIVE_INFINITY;
        }
  }
  // s = -inf for keys of a tile, counted down, that a row does not see: of a PARTIAL one by bits or the predicate, else
  // those behind the last. One piece of code hides them all: with one for each kind NVRTC takes a fifth longer.
  template <class Mask, class Terms, int FLOATS>
  __device__ __forceinline__ void mask_tile(float (&s)[FLOATS], SeenKeys<2, BLOCK_N>& seen, int tile, const Mask& mask,
                                            const Terms& terms, const FirstPair& first) const {
    using Own = decltype(terms.own);
    const auto [batch, head, row, key] = first;
    if (!is_packed(up(tile))) {
      const int keys = tiles > 0 ? mask.seqlen_k : 0;
      if (!is_partial(tile) && (key & -8) + BLOCK_N <= keys) return;
      seen.show_all();
      if (is_partial(tile)) {
        if constexpr (Own::SHOWS && Own::IN_LOOP) seen.ask(terms, batch, head, row, key);
        else mask_partial(s, terms, batch, head, row, key);
        seen.keep(mask.keys_from(row, key));
      } else {
        seen.keep(KeysFrom<false>{0, keys - key});
      }
    }
    mask_unseen(s, seen);
  }
};

// Asks mask and predicate of all pairs in PARTIAL blocks, a warp 32 queries by 32 keys at a time, for all heads that
// share the answers: grid (blocks of rows, shares of their lists, answers). Blocks of keys are whole words; BY_KEYS,
// blocks of rows are, and bits stand by keys.
template <class Mask, bool BY_KEYS, class Terms>
__device__ __forceinline__ void pack_partial_blocks(const KeyList& list, const Terms& terms, int heads, int seqlen_q,
                                                    int seqlen_k) {
  grid_dependency_launch();
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int batch = blockIdx.z / heads, head = blockIdx.z - batch * heads, block_row = blockIdx.x * list.block_rows;
  const int64_t row = batch * list.batch_stride + head * list.head_stride + blockIdx.x;
  const int columns = list.block_keys / 32, pieces = columns * ((list.block_rows + 31) / 32);
  const Mask mask(seqlen_q, seqlen_k, terms.given.window);
  uint32_t* bits = list.bits + batch * list.bits_batch_stride + head * list.bits_head_stride;
  auto sees = [&](int query, int key) { return (key < mask.keys_of(query)) & terms.shows(batch, head, query, key); };
  const int room = BY_KEYS ? list.key_blocks : list.bits_row_words / columns;  // the kernel asks of further blocks
  const int all = min(list.partial_counts[row], room) * pieces;
  for (int number = blockIdx.y * warps + threadIdx.x / 32; number < all; number += gridDim.y * warps) {
    const int piece = number % pieces, rows = piece / columns * 32, column = piece % columns;
    const int first_key = list.partial_blocks[row * list.key_blocks + number / pieces] * list.block_keys + column * 32;
    uint32_t word = 0;  // of the lane's row, or BY_KEYS key
    // Neighbouring keys lie next to one another: a lane takes a key. Else what a row's keys share is computed once: a
    // lane takes a row.
    constexpr bool KEY_OF_LANE = decltype(terms.own)::PAIRED;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      const int row = block_row + rows + (KEY_OF_LANE ? i : lane), key = first_key + (KEY_OF_LANE ? lane : i);
      if constexpr (KEY_OF_LANE == BY_KEYS) {
        word |= uint32_t(sees(row, key)) << i;
      } else {
        const uint32_t of_line = __ballot_sync(ALL_LANES, sees(row, key));
        if (lane == i) word = of_line;
      }
    }
    if constexpr (BY_KEYS) {
      bits[int64_t(first_key + lane) * list.bits_row_words + (block_row + rows) / 32] = word;
    } else if (rows + lane < list.block_rows) {
      bits[int64_t(block_row + rows + lane) * list.bits_row_words + number / pieces * columns + column] = word;
    }
  }
}
#define PACK_MASK_KERNEL(TERMS, BY_KEYS)                                                                            \
  extern "C" __global__ void __launch_bounds__(128)                                                                 \
      pack_mask(int bits_heads, int seqlen_q, int seqlen_k VARIANT_PARAMETERS KEY_LIST_PARAMETERS) {                \
    pack_partial_blocks<Mask, BY_KEYS>(KeyList{KEY_LIST_ARGUMENTS}, TERMS{VARIANT_ARGUMENTS}, bits_heads, seqlen_q, \
                                       seqlen_k);                                                                   \
  }
