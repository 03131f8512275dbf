// work.cuh: the rows and the keys of a block of latent_wgmma, and where those that share keys leave results. Needs the
// constants of latent_wgmma.cu.j2.
#include "device/mask.cuh"
#include "flash_wgmma/tile_scheduler.cuh"

struct Work : TileScheduler {
  const int splits, split_tiles, group_heads;
  int query, first_head;  // of the block's rows, which are this head and those behind it of a K/V head's group
  float* partial_gmem;
  float2* state_gmem;

  __device__ __forceinline__ Work(unsigned char* smem, int kv_heads, int seqlen_q, int seqlen_k, int group_heads,
                                  int splits, int split_tiles, float* partial_gmem, float2* state_gmem,
                                  const Terms& given)
      : TileScheduler(smem, gridDim.z, group_heads, 1, seqlen_q, seqlen_k, given, KeyList{}),
        splits(splits),
        split_tiles(split_tiles),
        group_heads(group_heads),
        partial_gmem(partial_gmem),
        state_gmem(state_gmem) {
    heads = kv_heads * group_heads, this->kv_heads = kv_heads;  // above one, which costs no division
    rows.bits = max(6, rows.bits), rows.count = seqlen_q << rows.bits;
    // Blocks of the same keys are neighbours.
    const int head_blocks = (group_heads + 63) / 64;
    row_blocks = head_blocks * seqlen_q;
    split = blockIdx.x / row_blocks;
    const int row_block = blockIdx.x % row_blocks;
    query = row_block / head_blocks, first_head = row_block % head_blocks * 64;
    tile = Tile{(query << (rows.bits - 6)) + first_head / 64, int(blockIdx.y), int(blockIdx.z)};
  }
  // The keys of the block: one tile of them at least, which may be wholly masked.
  __device__ __forceinline__ void begin() {
    if constexpr (SEQUSED) enter_batch(tile.batch);
    const int first = split * split_tiles;
    enter_keys(max(0, KeyMask<CAUSAL, CAUSAL_LOWER_RIGHT>(seqlen_q, seqlen_k).keys_of(query)));
    range.word = (max(first, min(first + split_tiles, tiles_of_keys()) - 1) << 16) | first;
  }
  __device__ __forceinline__ int tiles_of_keys() const { return (seqlen_k + BLOCK_N - 1) / BLOCK_N; }
  // SEQUSED: a split has keys as far as the sequence has; the others leave no result.
  __device__ __forceinline__ bool is_empty() const { return split > 0 && range.first() >= tiles_of_keys(); }
  __device__ __forceinline__ void tell_splits() const {
    if (splits > 1 && split == 0 && threadIdx.x == 0)
      filled_splits(state_gmem, int64_t(batch) * kv_heads * row_blocks * splits)[result() / splits] =
          max(1, min(splits, (tiles_of_keys() + split_tiles - 1) / split_tiles));
  }
  // Of shares of the keys: [batch, kv_heads, row blocks, splits].
  __device__ __forceinline__ int64_t result() const {
    return ((int64_t(tile.batch) * kv_heads + tile.head) * row_blocks + blockIdx.x % row_blocks) * splits + split;
  }
};
