"""Bulk copies of plain bytes, and sums in global memory by the copy engine."""

import numpy as np

from tests.ptx.golden.harness import run_hopper

LEAVES = """
__device__ __forceinline__ void load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void add(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
    :: "l"(to), "r"(from), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
"""
LOAD = (
    LEAVES
    + """
extern "C" __global__ void k(const float* source, float* out, int first, int bytes, int shift) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t tile = shared_address(smem) + shift, barrier = shared_address(smem) + 1024;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(barrier, bytes);
    load(tile, source + first, bytes, barrier);
  }
  __syncthreads();
  WAIT
  for (int i = threadIdx.x; i < bytes / 4; i += 128) out[i] = ((float*)(smem + shift))[i];
}"""
)
WAIT = "mbarrier_wait(barrier, 0);"


def load(first=4, size=256, shift=0, wait=WAIT):
    source, out = np.arange(300, dtype=np.float32), np.zeros(64, np.float32)
    scalars = [np.int32(first), np.int32(size), np.int32(shift)]
    execution = run_hopper(LOAD.replace("WAIT", wait), [source, out], scalars=scalars, smem=1040)
    return out, execution


def test_bytes_arrive():
    out, execution = load()
    assert not execution.faults and np.array_equal(out, np.arange(4, 68, dtype=np.float32))


def test_who_does_not_wait_races():
    assert "Race" in load(wait="")[1].faults[0]


def test_places_and_sizes_are_of_sixteen_bytes():
    assert "multiple of 16" in load(first=1)[1].faults[0]
    assert "multiple of 16" in load(size=40)[1].faults[0]
    assert "multiple of 16" in load(shift=8)[1].faults[0]


def test_bytes_past_a_buffer_are_a_fault():
    assert "buffer" in load(first=260, size=256)[1].faults[0]


ADD = (
    LEAVES
    + """
extern "C" __global__ void k(float* sums, int shift) {
  extern __shared__ __align__(1024) unsigned char smem[];
  reinterpret_cast<float*>(smem)[threadIdx.x] = threadIdx.x;
  FENCE
  __syncthreads();
  if (threadIdx.x == 0) {
    add(sums + shift, shared_address(smem), 512);
    WAIT
  }
  __syncthreads();
  AFTER
}"""
)
READ = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'


def add(fence=FENCE, wait=READ, after="", shift=0, blocks=3, **options):
    sums = np.full(128, 0.5, np.float32)
    source = ADD.replace("FENCE", fence).replace("WAIT", wait).replace("AFTER", after)
    return sums, run_hopper(source, [sums], scalars=[np.int32(shift)], smem=512, blocks=blocks, **options)


def test_sums_of_several_blocks():
    sums, execution = add()
    assert not execution.faults and np.array_equal(sums, 0.5 + 3 * np.arange(128))


def test_what_a_sum_needs():
    again = "reinterpret_cast<float*>(smem)[threadIdx.x] = 0.f;"
    assert "fence" in add(fence="")[1].faults[0]
    assert "exits before" in add(wait="")[1].faults[0]
    assert "has read" in add(wait="", after=again)[1].faults[0]
    assert not add(after=again)[1].faults
    assert "buffer" in add(shift=4)[1].faults[0]


def test_a_sum_may_come_as_late_as_the_wait_for_it_allows():
    how = {"after": "if (threadIdx.x == 0) atomicExch(sums, atomicAdd(sums + 5, 0.f));", "blocks": 1}
    assert add(**how)[0][0] == add(wait=READ.replace(".read", ""), late_blocks=True, **how)[0][0] == 5.5
    assert add(late_blocks=True, **how)[0][0] == 0.5


def test_a_plain_store_beside_a_sum_races():
    assert "Race" in add(after="sums[threadIdx.x] = 1.f;", blocks=2)[1].faults[0]


def test_bytes_are_stored():
    store = ("add(sums + shift", "store(sums + shift")
    kernel = STORE + ADD.replace(*store)
    source = kernel.replace("FENCE", FENCE).replace("WAIT", READ).replace("AFTER", "")
    for blocks, said in ((1, ""), (2, "Race")):
        sums = np.full(128, 0.5, np.float32)
        execution = run_hopper(source, [sums], scalars=[np.int32(0)], smem=512, blocks=blocks)
        assert said in "".join(execution.faults) and bool(said) == bool(execution.faults)
        assert said or np.array_equal(sums, np.arange(128))


STORE = """
__device__ __forceinline__ void store(float* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
    :: "l"(to), "r"(from), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
"""
