// key_share.cuh: which key tiles of which row tiles each block works on, where one wave of blocks shares all work
// equally and no mask shortens any of it (Osama et al., Stream-K, PPoPP 2023: "data-parallel, two-tile Stream-K").
// Whole row tiles come first: block b of B takes tiles b, b + B, b + 2B and so on, so that blocks read the same head at
// the same time. The last one to two row tiles per block are cut: their N key tiles are counted one after another, and
// block b takes those from b · N / B to (b + 1) · N / B, from the last to the first. N / B is at least the key tiles of
// one row tile, so at most two blocks share a row tile. Block b - 1 has its first keys and takes them before all else
// that was cut; block b has its last keys and takes them last. A block that waits for a result therefore waits for a
// block that gives it without waiting for anyone. IN_PARTS it is parts that are counted, from the last to the first:
// block b - 1 has the last keys of a row tile, and block b goes on with their sum.
//
// Blocks b and b + 1 begin at other key tiles. Where L2 does not hold the keys, row tiles that share them are therefore
// taken by a gang: the blocks of a row of the grid, which all take the same key tiles at the same time, block x of a
// gang of G those of row tile t · G + x. Above, "block" is a gang then, and "row tile" is G of them. The blocks of a
// gang begin one after another, so that most have the same place on their SMs and the same pace.

// Key tiles first() to last() of a tile of rows, in one word.
struct KeyRange {
  int word;     // bit 31: gives, IN_PARTS takes; 15 bits of last(), 16 of first()
  int sharers;  // SHARES_SEQUENCES: 16 bits, how many blocks have keys of it, then the first of them; 0: one alone
  __device__ __forceinline__ int first() const { return word & 0xffff; }
  __device__ __forceinline__ int last() const { return word >> 16 & 0x7fff; }
  // One of two blocks gives what it has: that with the first keys; IN_PARTS that with the last ones, whose parts are
  // added up before the others.
  __device__ __forceinline__ bool gives() const { return IN_PARTS ? first() > 0 : word < 0; }
  __device__ __forceinline__ bool takes() const { return IN_PARTS ? word < 0 : first() > 0; }
};

struct KeyShare {
  int index;  // the tile of rows
  KeyRange range;
  int end;  // key tiles not yet taken, counted as above

  // The next part of this block's work, false if there is none: `round` counts the calls from 0. `tiles` of rows, a
  // multiple of the gang.
  __device__ __forceinline__ bool next(int round, int tiles, int key_tiles) {
    const int gang = gridDim.x, blocks = gridDim.y, block = blockIdx.y;
    tiles /= gang;
    const int whole = max(0, tiles / blocks - 1);
    index = (round * blocks + block) * gang + blockIdx.x, range.word = (key_tiles - 1) << 16;
    if (round < whole) return true;
    const int units = IN_PARTS ? KeyParts::of(key_tiles - 1) + 1 : key_tiles;
    const int steps = (tiles - whole * blocks) * units, each = steps / blocks, left = steps - each * blocks;
    auto share = [&](int b) { return each * b + left * b / blocks; };  // b · steps / blocks without an overflow
    const int begin = share(block);
    if (round == whole) end = share(block + 1);
    if (end <= begin) return false;
    const int tile = (end - 1) / units, last = end - 1 - tile * units, first = max(0, begin - tile * units);
    index = (whole * blocks + tile) * gang + blockIdx.x;
    if constexpr (IN_PARTS) {
      const int last_tile = min(key_tiles, KeyParts::first_tile(units - first)) - 1;
      range.word = (first > 0 ? 1 << 31 : 0) | last_tile << 16 | KeyParts::first_tile(units - 1 - last);
    } else {
      range.word = (last < units - 1 ? 1 << 31 : 0) | last << 16 | first;
    }
    end = tile * units + first;
    return true;
  }
};
