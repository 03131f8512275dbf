// tile_order.cuh: which row block of which head is tile number i.

struct Tile {
  int row_block, head, batch;
};

// HEADS heads take turns (0: all of them), row block by row block; then the next HEADS. LAST_FIRST: row blocks from the
// last to the first, so that the longest of a causal mask start first.
template <int HEADS, bool LAST_FIRST>
__device__ __forceinline__ Tile tile_at(int index, int row_blocks, int heads, int batch) {
  const int all_heads = heads * batch, turn_heads = HEADS == 0 ? all_heads : HEADS;
  const int first_head = HEADS == 0 ? 0 : index / (turn_heads * row_blocks) * turn_heads;
  const int in_turn = index - first_head * row_blocks;
  const int taking_turns = HEADS == 1 ? 1 : min(turn_heads, all_heads - first_head);
  const int row_block = in_turn / taking_turns;
  const int head = first_head + in_turn - row_block * taking_turns;
  return Tile{LAST_FIRST ? row_blocks - 1 - row_block : row_block, head % heads, head / heads};
}
