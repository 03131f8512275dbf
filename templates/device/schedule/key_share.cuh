// key_share.cuh: which key tiles of which tiles of rows are a block's, where one wave of blocks shares all work alike
// and no mask makes some of it shorter (Osama et al., Stream-K, PPoPP 2023: "data-parallel, two-tile Stream-K"). Whole
// tiles come first, at a stride of gridDim.x, so that blocks read the same head at the same time. The last one to two
// tiles per block are cut: their N key tiles are counted one after another, and block b of B takes those from b · N / B
// to (b + 1) · N / B, from the last to the first. As N / B is a whole tile of rows at least, a tile of rows is two
// blocks' at most: block b - 1 has its first keys and takes them before the rest of what was cut, block b has its last
// keys and takes them last. So who waits for a result waits for a block that has waited for none before it gives.

// Key tiles first() to last() of a tile of rows, in one word.
struct KeyRange {
  int word;  // bit 31: gives; 15 bits of last(), 16 of first()
  __device__ __forceinline__ int first() const { return word & 0xffff; }
  __device__ __forceinline__ int last() const { return word >> 16 & 0x7fff; }
  __device__ __forceinline__ bool gives() const { return word < 0; }     // another block has the key tiles behind these
  __device__ __forceinline__ bool takes() const { return first() > 0; }  // another block has those before
};

struct KeyShare {
  int index;  // the tile of rows
  KeyRange range;
  int end;  // key tiles not yet taken, counted as above

  // The next part of this block's work, false if there is none: `round` counts the calls from 0.
  __device__ __forceinline__ bool next(int round, int tiles, int key_tiles) {
    const int blocks = gridDim.x, block = blockIdx.x, whole = max(0, tiles / blocks - 1);
    index = round * blocks + block, range.word = (key_tiles - 1) << 16;
    if (round < whole) return true;
    const int steps = (tiles - whole * blocks) * key_tiles, each = steps / blocks, left = steps - each * blocks;
    auto share = [&](int b) { return each * b + left * b / blocks; };  // b · steps / blocks without an overflow
    const int begin = share(block);
    if (round == whole) end = share(block + 1);
    if (end <= begin) return false;
    const int tile = (end - 1) / key_tiles, last = end - 1 - tile * key_tiles, first = max(0, begin - tile * key_tiles);
    index = whole * blocks + tile;
    range.word = (last < key_tiles - 1 ? 1 << 31 : 0) | last << 16 | first;
    end = tile * key_tiles + first;
    return true;
  }
};
