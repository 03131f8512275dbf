// cluster_merge.cuh: the blocks of a cluster hand each other their results for different keys of the same rows (sm_90).
// Items, chunks of four columns, are dealt to the blocks in fours; a block adds up what all sent it of its own.
#include "device/ptx/element.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/cluster_memory.cuh"
#include "device/merge/split_merge.cuh"

template <int BLOCKS, int ITEMS> struct ClusterMerge {
  static constexpr int SLOTS = (ITEMS + 4 * BLOCKS - 1) / (4 * BLOCKS) * 4;  // items of a block
  static constexpr int O_BYTES = BLOCKS * SLOTS * 16,
                       BYTES = O_BYTES + BLOCKS * SLOTS * 8;  // [block, slot]: O, then states

  // `memory_smem` is this block's own; it lies alike in all of them.
  static __device__ __forceinline__ void send(uint32_t memory_smem, int rank, int item, const RowShare& share) {
    const int slot = rank * SLOTS + item / (4 * BLOCKS) * 4 + item % 4;
    const uint32_t owner = cluster_address(memory_smem, item / 4 % BLOCKS);
    store_cluster(owner + slot * 16, share.o);
    store_cluster(owner + O_BYTES + slot * 8, make_float2(share.shift, share.sum));
  }
  // By all threads of all blocks, once: what was sent before is there after.
  static __device__ __forceinline__ void exchange() { cluster_sync(); }
  static __device__ __forceinline__ int item(int rank, int slot) { return slot / 4 * 4 * BLOCKS + rank * 4 + slot % 4; }

  static __device__ __forceinline__ RowShare total(const unsigned char* memory, int slot) {
    RowShare share;
    float2 state[BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      state[i] = reinterpret_cast<const float2*>(memory + O_BYTES)[i * SLOTS + slot];
      share.shift = fmaxf(share.shift, state[i].x);
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) share.add(reinterpret_cast<const float4*>(memory)[i * SLOTS + slot], state[i]);
    return share;
  }
};
