// cluster_sum.cuh: the sum over the blocks of a cluster of a tile of floats of which each has a part (sm_90). The
// tile's vectors of 4 floats are dealt to the blocks: all send a block its vectors, and it sends all their sum, so that
// each is added up once, in the order of the blocks. Two barriers count the bytes that arrive; nothing fences the whole
// GPU, which would also wait for copies under way.
#include "device/ptx/element.cuh"
#include "device/ptx/shared_address.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/cluster_memory.cuh"

// Writes 16 bytes, which arrive at `barrier_smem`, into block `rank` of the cluster; both addresses are given as in
// this block.
__device__ __forceinline__ void send_16(uint32_t destination_smem, uint32_t barrier_smem, int rank, float4 x) {
  asm volatile(
      "{\n.reg .b32 destination, barrier;\n"
      "mapa.shared::cluster.u32 destination, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [destination], {%3, %4, %5, %6}, [barrier];\n}" ::
          "r"(destination_smem),
      "r"(barrier_smem), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
}

template <int BLOCKS, int VECTORS, int THREADS> struct ClusterSum {
  static constexpr int SHARE = (VECTORS + BLOCKS - 1) / BLOCKS;  // vectors of a block
  static constexpr int BYTES = BLOCKS * SHARE * 16 + 16;         // inbox [sender, SHARE] of vectors, two barriers

  float4* inbox_smem;
  uint32_t parts_barrier, sums_barrier;  // these lie alike in all blocks of the cluster
  int rank, own;                         // this block, and how many vectors are its

  // By all threads of all blocks of the cluster, as `sum`; who never comes to a sum calls `cluster_wait`.
  __device__ __forceinline__ void begin(float* memory_smem, int block) {  // BYTES, 16-byte aligned
    inbox_smem = reinterpret_cast<float4*>(memory_smem);
    parts_barrier = shared_address(inbox_smem + BLOCKS * SHARE), sums_barrier = parts_barrier + 8;
    rank = block, own = min(SHARE, max(0, VECTORS - rank * SHARE));
    if (threadIdx.x == 0) mbarrier_init(parts_barrier, 1), mbarrier_init(sums_barrier, 1), mbarrier_init_fence();
    __syncwarp();  // of a warp, all arrive at once
    cluster_arrive();
  }

  // The rounds are 0, 1, … The parts are visible to all threads of their block, and none still reads the sums of the
  // round before.
  template <typename Part, typename At>
  __device__ __forceinline__ void sum(Part part,    // the i-th vector of this block's part
                                      At sum_smem,  // address of the i-th vector of the sums, alike in all blocks
                                      int round) const {
    if (round == 0) cluster_wait();  // all blocks have begun and may be sent to
    else cluster_sync();             // no block still reads its inbox or the sums of the round before
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(parts_barrier, own * BLOCKS * 16);
      mbarrier_arrive_expect_tx(sums_barrier, VECTORS * 16);
    }
    for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
      send_16(shared_address(inbox_smem + rank * SHARE + i % SHARE), parts_barrier, i / SHARE, part(i));
    }
    mbarrier_wait_cluster(parts_barrier, round % 2);  // the parts of this block's vectors have come from all
    for (int i = threadIdx.x; i < BLOCKS * SHARE; i += THREADS) {
      const int vector = i % SHARE, receiver = i / SHARE;
      if (vector >= own) continue;
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        const float4 x = inbox_smem[block * SHARE + vector];
        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
      }
      send_16(sum_smem(rank * SHARE + vector), sums_barrier, receiver, total);
    }
    mbarrier_wait_cluster(sums_barrier, round % 2);  // all sums have come: no block has more to write here
  }
};
