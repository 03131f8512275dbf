// tile_scheduler.cuh: which rows of which head and batch a block works on, of what lengths, and which key tiles they
// see, by every schedule. Producer and consumers each have one: the producer's is led by a `TileFinder`, those of the
// consumers hear of the tiles of rows in shared memory. Each has one `next`. Needs the constants of flash_wgmma.cu.j2.
#include "device/ptx/read_again.cuh"
#include "device/ptx/shared_words.cuh"
#include "device/score.cuh"
#include "flash_wgmma/block_tile.cuh"
#include "flash_wgmma/key_share.cuh"
#include "flash_wgmma/sequence_share.cuh"
#include "device/schedule/block.cuh"
#include "device/schedule/sequences.cuh"
#include "flash_wgmma/tile_rows.cuh"
#include "flash_wgmma/shared_layout.cuh"

struct TileScheduler : Block {
  int batch, heads, kv_heads, seqlen_q, seqlen_k;  // SLIDING: the lengths are those of the tile at hand
  TileRows<GROUP_ROWS> rows;
  Terms terms;
  int batches, row_blocks, tiles, key_tiles;
  Mask mask;
  PackedSequences packed;
  Sequence sequence{};  // SLIDING: of the tile at hand, whose row block is one of it
  int split;            // this block takes key tiles split, split + KEY_SPLIT …, IN_PARTS parts of so many tiles
  Tile tile;            // at hand
  KeyRange range;       // BALANCED, ONE_QUERY: of it
  KeyList list;

  __device__ __forceinline__ TileScheduler(unsigned char* smem, int batch, int heads, int kv_heads, int seqlen_q,
                                           int seqlen_k, const Terms& terms, const KeyList& list)
      : Block(smem),
        batch(batch),
        heads(heads),
        kv_heads(kv_heads),
        seqlen_q(seqlen_q),
        seqlen_k(seqlen_k),
        rows(heads, kv_heads, seqlen_q),
        terms(terms),
        batches(VARLEN ? 1 : batch),
        row_blocks(VARLEN ? (terms.given.total_queries << rows.row_bits()) / BLOCK_M + batch
                          : (rows.count + BLOCK_M - 1) / BLOCK_M),
        tiles(row_blocks * rows.heads * batches),
        key_tiles((seqlen_k + BLOCK_N - 1) / BLOCK_N),
        mask(seqlen_q, seqlen_k, terms.given.window),
        packed{terms.given.query_starts,
               terms.given.key_starts,
               VARLEN ? terms.given.sequences : batch,
               seqlen_q,
               seqlen_k,
               rows.row_bits(),
               PAGED ? terms.given.seqused : nullptr},
        list(list) {
    split = blockIdx.x % KEY_SPLIT;
    tile = block_tile<HEADS_IN_TURN, LAST_FIRST, KEY_SPLIT>(row_blocks, rows.heads);  // of a block that takes one
  }
  // Most need not wait for a division.
  __device__ __forceinline__ int kv_head(const Tile& of) const {
    return GROUP_ROWS || heads == kv_heads ? of.head : of.head / (heads / kv_heads);
  }
  // False if the block has nothing to do.
  __device__ __forceinline__ bool begin() {
    if (!PERSISTENT && HEADS_IN_TURN > 1 && tile.batch >= batches) return false;
    if constexpr (VARLEN && !PERSISTENT) {
      if (!enter_slot(tile)) return false;
    }
    if constexpr (SEQUSED && !PERSISTENT) enter_batch(tile.batch);
    return true;
  }
  // The tile of rows that the producer has told, once its Q has come; false if none is left.
  __device__ __forceinline__ bool next(int round) {
    if constexpr (PERSISTENT) {
      int words[Smem::TILE_BYTES / 4];
      read_shared_words(smem_address + Smem::TILE + Smem::TILE_BYTES * (round % 2), lane, words);
      tile = Tile{words[0], words[1], words[2]}, range.word = words[3];
      if (tile.row_block < 0) return false;
      if constexpr (VARLEN) enter_sequence({words[4], words[5], 0, words[6]});
      if constexpr (SHARES_SEQUENCES) range.sharers = words[7];
      if constexpr (SEQUSED) enter_keys(words[6]);
    }
    return true;
  }

  __device__ __forceinline__ void enter_keys(int keys) {
    seqlen_k = keys;
    mask = Mask(seqlen_q, seqlen_k, terms.given.window);
    terms.given.diagonal = CAUSAL && !CAUSAL_LOWER_RIGHT ? 0 : seqlen_k - seqlen_q;
  }
  __device__ __forceinline__ void enter_sequence(const Sequence& next) {
    sequence = next, seqlen_q = next.queries;
    rows.set_queries(next.queries);
    enter_keys(next.keys);
  }
  __device__ __forceinline__ void enter_batch(int of) {
    sequence.first_key = of * terms.given.kv_rows;
    sequence.keys = terms.template keys_in_use<false>(of, packed.most_keys);
    enter_keys(sequence.keys);
  }
  // From the slot of a tile to the tile; false if the slot has none.
  __device__ __forceinline__ bool enter_slot(Tile& of) {
    of.batch = packed.at_slot<BLOCK_M>(of.row_block);
    of.row_block -= packed.first_slot<BLOCK_M>(of.batch);
    enter_sequence(packed.at(of.batch));
    return of.row_block * BLOCK_M < rows.count;
  }

  // The last key tile that some row of a row block sees, or the first.
  __device__ __forceinline__ int last_seen_tile(int row_block) const {
    const int keys = mask.keys_before(rows.queries_before(min((row_block + 1) * BLOCK_M, rows.count)));
    return max(0, (keys + BLOCK_N - 1) / BLOCK_N - 1);
  }
  // The same of those of this block; its first, wholly masked, where there is none.
  __device__ __forceinline__ int last_key_tile(int row_block) const {
    const int seen = last_seen_tile(row_block);
    if constexpr (IN_PARTS) {
      const int last = KeyParts::of(seen), part = split + max(0, last - split) / KEY_SPLIT * KEY_SPLIT;
      return part > last ? KeyParts::first_tile(part) : min(seen, KeyParts::first_tile(part + 1) - 1);
    }
    return split + max(0, seen - split) / KEY_SPLIT * KEY_SPLIT;
  }
  // IN_PARTS: of a row block the first part with keys that some row sees, and the last one.
  __device__ __forceinline__ int first_part(int row_block) const {
    if constexpr (!Mask::WINDOW) return 0;
    return KeyParts::of(min(last_seen_tile(row_block), mask.first_key(rows.query(row_block * BLOCK_M)) / BLOCK_N));
  }
  __device__ __forceinline__ int last_part(int row_block) const { return KeyParts::of(last_seen_tile(row_block)); }
  // The key tile of this block before another one: of its parts those between are other blocks'.
  __device__ __forceinline__ int tile_before(int key_tile) const {
    if constexpr (IN_PARTS && KEY_SPLIT > 1) {
      const int part = KeyParts::of(key_tile);
      return key_tile == KeyParts::first_tile(part) ? KeyParts::tile_before(part) : key_tile - 1;
    }
    return key_tile - KEY_STEP;
  }
  // The first key tile that some row of a row block sees: the last one where there is none.
  __device__ __forceinline__ int first_key_tile(int row_block) const {
    return Mask::WINDOW ? min(last_key_tile(row_block), mask.first_key(rows.query(row_block * BLOCK_M)) / BLOCK_N) : 0;
  }
  // The listed tiles of keys of the tile at hand, counted down.
  __device__ __forceinline__ ListedTiles<BLOCK_N> listed() const {
    return ListedTiles<BLOCK_N>(list, tile.batch, tile.head, tile.row_block * BLOCK_M);
  }
  // Of the tile at hand, from the last to the first.
  __device__ __forceinline__ int last_key_tile() const {
    if constexpr (KeyList::LISTED) return max(0, listed().tiles - 1);
    return SCHEDULE == Schedule::BALANCED || ONE_QUERY ? range.last() : last_key_tile(tile.row_block);
  }
  __device__ __forceinline__ int first_key_tile() const {
    if constexpr (KeyList::LISTED) return 0;
    return SCHEDULE == Schedule::BALANCED || ONE_QUERY ? range.first() : first_key_tile(tile.row_block);
  }
};

// Finds the tiles of rows of a block, by the producer.
struct TileFinder : Block {
  TileScheduler& work;
  uint32_t* counters_zeroed;  // CLAIMED: tiles claimed so far
  int index, turn;            // turn: VARLEN, rounds and slots without a tile
  KeyShare share;
  SequenceShare sequence_share;

  __device__ __forceinline__ TileFinder(TileScheduler& work, uint32_t* counters_zeroed)
      : Block(work), work(work), counters_zeroed(counters_zeroed), turn(0) {}

  // IN_ORDER, by a whole warp: the batches from that with most keys in use on, so that no block begins a long one when
  // others end. Which keys are in use the device alone knows.
  __device__ __forceinline__ void order_batches() const {
    const int keys = lane < work.batch ? max(0, min(work.packed.most_keys, work.terms.given.seqused[lane])) : 0;
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < work.batch; ++i) {
      const int other = __shfl_sync(ALL_LANES, keys, i);
      before += other > keys || (other == keys && i < lane);
    }
    if (lane < work.batch) write_shared_word(smem_address + Smem::ORDER + 4 * before, lane);
    __syncwarp();
  }
  // Before the first round.
  __device__ __forceinline__ void start() { index = blockIdx.x; }
  // The next tile of rows, which it tells the consumers if it `tells`; false if none is left. They read it once their Q
  // is full. Its place is that of the round before the last, in which all of them released Q.
  template <class End> __device__ __forceinline__ bool next(int round, bool tells, End end) {
    if constexpr (SHARES_SEQUENCES) {
      index = sequence_share.next(work) ? 0 : work.tiles;
    } else if constexpr (VARLEN && PERSISTENT) {
      for (; index < work.tiles; index = next_index(++turn)) {
        work.tile = tile_at<HEADS_IN_TURN, LAST_FIRST>(index, work.row_blocks, work.rows.heads, work.batches);
        if (work.enter_slot(work.tile)) break;
      }
    }
    if constexpr (SCHEDULE == Schedule::BALANCED && !VARLEN)
      index = share.next(round, work.tiles, work.key_tiles) ? share.index : work.tiles;
    const uint32_t tile_smem = smem_address + Smem::TILE + Smem::TILE_BYTES * (round % 2);
    auto tell = [&](int offset, int word) {
      if (tells) write_shared_word(tile_smem + offset, word);
    };
    if (PERSISTENT && index >= work.tiles) {
      tell(0, -1);
      end();
      return false;
    }
    if constexpr (PERSISTENT) {
      if constexpr (!VARLEN)
        work.tile = tile_at<HEADS_IN_TURN, LAST_FIRST>(index, work.row_blocks, work.rows.heads, work.batch);
      if constexpr (IN_ORDER) {
        if (work.batch <= ORDERED_BATCHES)
          work.tile.batch = read_shared_word(smem_address + Smem::ORDER + 4 * work.tile.batch);
      }
      tell(0, work.tile.row_block), tell(4, work.tile.head), tell(8, work.tile.batch);
      if (SCHEDULE == Schedule::BALANCED && !VARLEN) work.range = share.range;
      if (SCHEDULE == Schedule::BALANCED) tell(12, work.range.word);
      if constexpr (VARLEN) tell(16, work.sequence.first_query), tell(20, work.sequence.queries);
      if constexpr (SEQUSED) work.enter_batch(work.tile.batch);
      if constexpr (SLIDING) tell(24, work.sequence.keys);
      if constexpr (SHARES_SEQUENCES) tell(28, work.range.sharers);
    }
    return true;
  }
  // After the work on it.
  __device__ __forceinline__ void move_on(int round) {
    if constexpr (SCHEDULE != Schedule::BALANCED) index = next_index(VARLEN ? ++turn : round + 1);
  }

private:
  // Every tile makes one claim, so that the counter wraps to 0 with the launch's last.
  __device__ __forceinline__ int next_index(int turn) const {
    return SCHEDULE == Schedule::CLAIMED ? blocks_read_again() + int(atomicInc(counters_zeroed, work.tiles - 1))
                                         : fixed_tile<LAST_FIRST>(turn);
  }
};
