"""Races in shared memory: each missing synchronization is found, and no right kernel is accused."""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_cuda

PIPELINE = """
#define STAGES {stages}
#define TILES {tiles}
__device__ __forceinline__ void copy(unsigned to, const void* from) {{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}}
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
extern "C" __global__ void k(float* out, const float4* in) {{
  __shared__ float4 ring[STAGES][128];
  float sum = 0; int t = threadIdx.x;
  for (int s = 0; s < STAGES - 1; s++) {{ if (s < TILES) copy(__cvta_generic_to_shared(&ring[s][t]), &in[s * 128 + t]);
    COMMIT; }}
  for (int i = 0; i < TILES; i++) {{
    {before}
    int next = i + STAGES - 1;
    if (next < TILES) copy(__cvta_generic_to_shared(&ring[next % STAGES][t]), &in[next * 128 + t]);
    COMMIT; WAIT({pending}); {after}
    for (int j = 0; j < 4; j++) {{ float4 v = ring[i % STAGES][(t * 5 + 32 * j) % 128];
      sum += v.x + v.y * 2 + v.z * 3 + v.w * 4; }}
  }}
  out[t] = sum;
}}"""


def pipeline(stages, before="__syncthreads();", after="__syncthreads();", pending=None, tiles=6):
    source = PIPELINE.format(
        stages=stages, tiles=tiles, before=before, after=after, pending=stages - 1 if pending is None else pending
    )
    data = np.random.default_rng(0).standard_normal((tiles, 128, 4)).astype(np.float32)
    out = np.zeros(128, np.float32)
    faults = run_cuda(source, out, data, threads=128).faults
    t = np.arange(128)
    expected = sum((data[:, (t * 5 + 32 * j) % 128] * np.float32([1, 2, 3, 4])).sum((0, 2)) for j in range(4))
    return faults, np.allclose(out, expected, atol=1e-3)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_right_pipelines(stages):
    assert pipeline(stages) == ((), True)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_broken_pipelines(stages):
    faults, _ = pipeline(stages, before="")  # a stage is overwritten while others still read it
    assert any(("warp" in f and "has read" in f) or "wrote" in f for f in faults)
    faults, _ = pipeline(stages, after="")  # only the copying thread knows that its data is there
    assert any("reads" in f and "wrote last" in f for f in faults)
    faults, right = pipeline(stages, pending=stages)  # waits for one group too few
    assert any("not yet waited for" in f for f in faults) and not right


def test_one_barrier_is_enough_where_the_copy_follows_it():
    """With a stage to spare, the barrier after the wait also protects the stage that is overwritten next."""
    source = PIPELINE.format(stages=3, tiles=6, before="WAIT(1); __syncthreads();", after="", pending=2)
    data, out = np.ones((6, 128, 4), np.float32), np.zeros(128, np.float32)
    assert run_cuda(source, out, data, threads=128).faults == () and (out == 240).all()


EXCHANGE = """
extern "C" __global__ void k(float* out, const float* in) {{
  __shared__ float tile[128];
  int t = threadIdx.x; float sum = 0;
  for (int i = 0; i < 3; i++) {{ tile[t] = in[t] + i; {after_write} sum += tile[t ^ {partner}]; {after_read} }}
  out[t] = sum;
}}"""


def exchange(partner, after_write, after_read):
    values, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    return run_cuda(
        EXCHANGE.format(partner=partner, after_write=after_write, after_read=after_read), out, values, threads=128
    ).faults


@pytest.mark.parametrize("partner, sync", [(1, "__syncwarp();"), (1, "__syncthreads();"), (64, "__syncthreads();")])
def test_exchange_through_shared_memory(partner, sync):
    assert exchange(partner, sync, sync) == ()
    assert "reads what thread" in exchange(partner, "", sync)[0]
    assert "overwrites what" in exchange(partner, sync, "")[0] or "reads what" in exchange(partner, sync, "")[0]


def test_a_warp_barrier_orders_no_other_warp_and_shuffles_order_nothing():
    assert exchange(64, "__syncwarp();", "__syncwarp();")
    assert exchange(1, "__shfl_xor_sync(~0u, t, 1);", "__syncwarp();")


def test_part_of_a_warp_synchronizes_itself_only():
    mask = "__syncwarp(t & 16 ? 0xffff0000u : 0x0000ffffu);"
    assert exchange(3, mask, mask) == ()
    assert exchange(16, mask, mask)


def named(producers_signal, consumers_wait, back_signal, back_wait):
    """Warp 0 fills a buffer, warp 1 drains it, by named barriers 1 (full) and 2 (empty)."""
    source = f"""
#define SYNC(n) asm volatile("bar.sync %0, 64;" :: "n"(n) : "memory")
#define ARRIVE(n) asm volatile("bar.arrive %0, 64;" :: "n"(n) : "memory")
#define NOTHING(n)
extern "C" __global__ void k(float* out, const float* in) {{
  __shared__ float tile[32];
  int lane = threadIdx.x % 32; float sum = 0;
  if (threadIdx.x < 32) for (int i = 0; i < 4; i++) {{ if (i) {{ {back_wait}(2); }} tile[lane] = in[lane] + i;
    {producers_signal}(1); }}
  else for (int i = 0; i < 4; i++) {{ {consumers_wait}(1); sum += tile[31 - lane]; out[lane] = sum; if (i < 3) {{
    {back_signal}(2); }} }}
}}"""
    values, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    return run_cuda(source, out, values, threads=64).faults, out.tolist() == (4 * values[::-1] + 6).tolist()


def test_named_barriers():
    assert named("ARRIVE", "SYNC", "ARRIVE", "SYNC") == ((), True)
    assert named("SYNC", "SYNC", "SYNC", "SYNC") == ((), True)
    assert named("ARRIVE", "SYNC", "NOTHING", "NOTHING")[0]  # the producer runs ahead of the consumer


def test_equal_values_written_by_one_instruction_are_no_race():
    source = """
extern "C" __global__ void k(int* out) {{ __shared__ int flag; flag = {value}; __syncthreads();
  out[threadIdx.x] = flag; }}"""
    out = np.zeros(32, np.int32)
    assert run_cuda(source.format(value="out[0] + 3"), out).faults == ()
    assert "different value" in run_cuda(source.format(value="threadIdx.x"), out).faults[0]


@pytest.mark.parametrize(("second", "races"), [("t == 0", False), ("t == 1", True), ("t < 2", True), ("t > 0", True)])
def test_a_write_by_one_thread_races_with_that_of_another_behind_it(second, races):
    """Whether the first of them writes again or not."""
    source = f"""
extern "C" __global__ void k(int* out) {{ volatile __shared__ int flag; int t = threadIdx.x;
  if (t == 0) flag = 1; if ({second}) flag = 2; __syncthreads(); out[t] = flag; }}"""
    assert bool(run_cuda(source, np.zeros(64, np.int32), threads=64).faults) == races


def test_memory_reused_for_another_purpose_after_a_barrier():
    source = """
extern "C" __global__ void k(int* out, const int* in) {{
  extern __shared__ unsigned char raw[];
  unsigned short* first = (unsigned short*)raw; int* second = (int*)raw;
  first[threadIdx.x] = in[threadIdx.x]; __syncthreads();
  int x = first[63 - threadIdx.x]; {sync}
  second[threadIdx.x] = x * 2; __syncthreads();
  out[threadIdx.x] = second[threadIdx.x ^ 32];
}}"""
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    assert run_cuda(source.format(sync="__syncthreads();"), out, values, threads=64, smem=256).faults == ()
    assert np.array_equal(out, 2 * (63 - (values ^ 32)))
    assert run_cuda(source.format(sync=""), out, values, threads=64, smem=256).faults


def test_a_race_in_one_of_many_blocks_that_run_apart():
    """Only block 3 skips the barrier between writing and reading, in its last round, when the other blocks are done or
    elsewhere."""
    source = """
extern "C" __global__ void k(int* out) {
  __shared__ int tile[64];
  int sum = 0, rounds = blockIdx.x + 2;
  for (int i = 0; i < rounds; i++) {
    tile[threadIdx.x] = i; if (blockIdx.x != BAD || i < rounds - 1) __syncthreads();
    sum += tile[63 - threadIdx.x]; __syncthreads();
  }
  out[blockIdx.x * 64 + threadIdx.x] = sum;
}"""
    out = np.zeros(6 * 64, np.int32)
    assert run_cuda(source.replace("BAD", "-1"), out, blocks=6, threads=64).faults == ()
    [fault] = run_cuda(source.replace("BAD", "3"), out, blocks=6, threads=64).faults
    assert "of block 3 reads" in fault
