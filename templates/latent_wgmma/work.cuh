// work.cuh: the rows and the keys of a block of latent_wgmma. Needs the constants of latent_wgmma.cu.j2.
#include "device/mask.cuh"
#include "device/schedule/block.cuh"
#include "device/score.cuh"
#include "latent_wgmma/shared_layout.cuh"

struct Work : Block {
  int kv_heads, seqlen_q, seqlen_k, group_heads, splits;
  Terms terms;
  int kv_head, batch, row_blocks, split, row_block, query;
  int first_head, heads;            // heads from there on
  int keys, first_tile, last_tile;  // of keys, from the last to the first: one at least, which may be wholly masked

  __device__ __forceinline__ Work(unsigned char* smem, int kv_heads, int seqlen_q, int seqlen_k, int group_heads,
                                  int splits, int split_tiles, const Terms& given)
      : Block(smem),
        kv_heads(kv_heads),
        seqlen_q(seqlen_q),
        seqlen_k(seqlen_k),
        group_heads(group_heads),
        splits(splits),
        terms(given),
        kv_head(blockIdx.y),
        batch(blockIdx.z) {
    // Blocks of the same keys are neighbours.
    const int head_blocks = (group_heads + 63) / 64;
    row_blocks = head_blocks * seqlen_q;
    split = blockIdx.x / row_blocks, row_block = blockIdx.x % row_blocks;
    query = row_block / head_blocks;
    const int group_head = row_block % head_blocks * 64;
    first_head = kv_head * group_heads + group_head, heads = group_heads - group_head;
    if constexpr (SEQUSED) this->seqlen_k = terms.template keys_in_use<false>(batch, seqlen_k);
    keys = Mask(seqlen_q, this->seqlen_k).keys_of(query);
    first_tile = split * split_tiles;
    last_tile = max(first_tile, min(first_tile + split_tiles, (keys + BLOCK_N - 1) / BLOCK_N) - 1);
  }
  // SEQUSED: a split has keys as far as the sequence has; the others leave no result.
  __device__ __forceinline__ bool is_empty() const { return split > 0 && first_tile * BLOCK_N >= keys; }
  __device__ __forceinline__ int filled_splits(int split_tiles) const {
    const int tiles = (keys + BLOCK_N - 1) / BLOCK_N;
    return max(1, min(splits, (tiles + split_tiles - 1) / split_tiles));
  }
  __device__ __forceinline__ uint32_t k_full(const Ring& at) const { return barrier(Smem::K_FULL, at.stage); }
  __device__ __forceinline__ uint32_t k_empty(const Ring& at) const { return barrier(Smem::K_EMPTY, at.stage); }
  // Of shares of the keys: [batch, kv_heads, row blocks, splits].
  __device__ __forceinline__ int64_t result() const {
    const int64_t tile = (int64_t(batch) * kv_heads + kv_head) * row_blocks + row_block;
    return tile * splits + split;
  }
};
