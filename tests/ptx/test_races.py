"""Races in shared memory: each missing synchronization is found, and no right kernel is accused. Races in global
memory between blocks, whatever order they run in, and what orders them."""

import numpy as np
import pytest

from tests.ptx.golden.harness import cuda_kernel, launch, run_cuda

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


BLOCKS, THREADS = 70, 64  # more than run at once

LAST_BLOCK_ADDS = """
extern "C" __global__ void k(int* out, int* partial, unsigned* arrived) {
  __shared__ int is_last;
  const int t = threadIdx.x, b = blockIdx.x, n = gridDim.x;
  partial[b * 64 + t] = b + t;
  __syncthreads();                                  // the block's partials are written
  if (t == 0) {
    __threadfence();                                // and visible before its arrival
    is_last = atomicAdd(arrived, 1u) == n - 1;
    __threadfence();                                // others' partials are visible from here
  }
  __syncthreads();                                  // is_last
  if (!is_last) return;
  int sum = 0;
  for (int i = 0; i < n; i++) sum += partial[i * 64 + t];
  out[t] = sum;
  if (t == 0) *arrived = 0;
}"""
EXPECTED = BLOCKS * (BLOCKS - 1) // 2 + BLOCKS * np.arange(THREADS)
RELEASE = "    __threadfence();                                // and"
ACQUIRE = "    __threadfence();                                // others'"
ADD = "atomicAdd(arrived, 1u)"


def inline(opcode):
    return f"""[&] {{ unsigned v; asm volatile("{opcode} %0, [%1], 1;" : "=r"(v) : "l"(arrived) : "memory"); return v;
      }}()"""


def run(source, blocks=BLOCKS):
    out, partial, arrived = np.zeros(64, np.int32), np.zeros(64 * blocks, np.int32), np.zeros(1, np.uint32)
    return out, arrived, run_cuda(source, out, partial, arrived, blocks=blocks, threads=THREADS)


RIGHT = {
    "fences around an atomic": [],
    "an atomic that wraps round": [(ADD, "atomicInc(arrived, n - 1)"), ("if (t == 0) *arrived = 0;", "")],
    "an atomic that releases and acquires": [
        (RELEASE, "//"),
        (ACQUIRE, "//"),
        (ADD, inline("atom.acq_rel.gpu.global.add.u32")),
    ],
    "fences by all threads": [
        ("  __syncthreads();                                  // the", "  __threadfence(); __syncthreads();  // the"),
        (RELEASE, "//"),
        (ACQUIRE, "//"),
        ("if (!is_last) return;", "if (!is_last) return; __threadfence();"),
    ],
    "the counter reset by an atomic": [("*arrived = 0;", "atomicExch(arrived, 0u);")],
}
FAULTS = {
    "no release": ([(RELEASE, "//")], "wrote"),
    "no acquire": ([(ACQUIRE, "//")], "wrote"),
    "fences of the block": ([("__threadfence()", "__threadfence_block()")], "wrote"),
    "an atomic that only releases": (
        [(RELEASE, "//"), (ACQUIRE, "//"), (ADD, inline("atom.release.gpu.global.add.u32"))],
        "wrote",
    ),
    "an atomic that only acquires": (
        [(RELEASE, "//"), (ACQUIRE, "//"), (ADD, inline("atom.acquire.gpu.global.add.u32"))],
        "wrote",
    ),
    "not all of the block has written": ([("__syncthreads();                                  // the", "//")], "wrote"),
    "the block is not told": ([("__syncthreads();                                  // is_last", "//")], ""),
    "the last block does not wait for the others": ([("== n - 1", "== n - 2")], "wrote"),
    "reset before the last arrival": (
        [("if (!is_last) return;", "if (b == 3 && t == 0) *arrived = 0; if (!is_last) return;")],
        "atomic",
    ),
}


def changed(edits):
    source = LAST_BLOCK_ADDS
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("case", RIGHT)
def test_the_last_block_merges(case):
    out, arrived, execution = run(changed(RIGHT[case]))
    assert not execution.faults and np.array_equal(out, EXPECTED) and arrived[0] == 0


@pytest.mark.parametrize("case", FAULTS)
def test_a_missing_order_is_found(case):
    edits, words = FAULTS[case]
    faults = run(changed(edits))[2].faults
    assert faults and any(words in fault for fault in faults), faults
    assert words == "" or "nothing orders the two" in faults[0]


SIMPLE = 'extern "C" __global__ void k(int* out, int* in) {{ const int t = threadIdx.x, b = blockIdx.x; {} }}'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("out[b * 64 + t] = in[t];", ""),
        ("out[b * 63 + t] = in[t];", "writes"),  # neighbours overlap by one
        ("out[t] = b;", "writes"),
        ("if (t == 0) out[0] = 7;", "writes"),
        ("if (b == 69) out[t] = in[64 + t]; else if (b == 0) in[64 + t] = 1;", "wrote"),  # far apart
        ("if (b == 0) out[t] = in[64 + t]; else if (b == 69) in[64 + t] = 1;", "read"),
        ("if (b == 1) out[t] = in[64 + t]; else if (b == 0) in[64 + t] = 1;", "wrote"),  # side by side
        ("atomicAdd(out, 1);", ""),
        ("atomicAdd(out, 1); if (b == 2 && t == 0) in[0] = out[0];", "read"),
        ("out[b * 64 + t] = t; in[b * 64 + t] = out[b * 64 + (t ^ 1)];", "wrote"),  # inside a warp
        ("out[b * 64 + t] = t; __syncthreads(); in[b * 64 + t] = out[b * 64 + (t ^ 33)];", ""),
        ("out[b * 64 + t] = t; __syncwarp(); in[b * 64 + t] = out[b * 64 + (t ^ 1)];", ""),
        ("out[b * 64 + t] = t; __syncwarp(); in[b * 64 + t] = out[b * 64 + (t ^ 33)];", "wrote"),
        ("volatile int* flag = in; if (b == 5) *flag = 1; else if (t == 0) out[b] = *flag;", ""),
    ],
)
def test_blocks_side_by_side(body, words):
    arrays = np.zeros(64 * BLOCKS, np.int32), np.zeros(64 * BLOCKS, np.int32)
    faults = run_cuda(SIMPLE.format(body), *arrays, blocks=BLOCKS, threads=THREADS).faults
    assert not faults if not words else "Race in global memory" in faults[0] and words in faults[0], faults


ADDED = """
extern "C" __global__ void k(float* sums, float* out) {{
  const int t = threadIdx.x, b = blockIdx.x;
  auto add = [&](float* at) {{
    asm volatile("red.global.add.v4.f32 [%0], {{%1, %1, %1, %1}};" :: "l"(at), "f"(1.f) : "memory");
  }};
  {}
}}"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("add(sums + 4 * t);", ""),
        ("if (b == 1) sums[4 * t + 3] = 0.f; else add(sums + 4 * t);", "sums"),
        ("if (b == 1) out[t] = sums[4 * t + 3]; else add(sums + 4 * t);", "sums"),
        ("if (b == 1) out[t] = sums[4 * t + 256]; else add(sums + 4 * t);", ""),
        ("if (b == 1) { add(sums + 4 * t); __syncthreads(); out[t] = sums[4 * (t ^ 33)]; }", ""),
        ("if (b == 1) { add(sums + 4 * t); out[t] = sums[4 * (t ^ 33)]; }", "atomically accessed"),
        ("add(sums + 4 * t); __syncthreads(); out[b * 64 + t] = sums[4 * t];", "sums"),
    ],
)
def test_added_floats_race_with_plain_accesses_alone(body, words):
    sums, out = np.zeros(1024, np.float32), np.zeros(64 * BLOCKS, np.float32)
    kernel = cuda_kernel(ADDED.format(body), "sm_90a")
    faults = launch(kernel, sums, out, blocks=BLOCKS, threads=THREADS).faults
    named = words.replace("sums", 'buffer "a0"')
    assert not faults if not words else "Race in global memory" in faults[0] and named in faults[0], faults


def test_a_flag_hands_over():
    """`st.release` and `ld.acquire`: block 69 looks once, after block 0."""
    source = SIMPLE.format("""
if (b == 0) { in[64 + t] = t; __syncthreads(); if (t == 0) asm volatile("st.release.gpu.b32 [%0], "
  "1;" :: "l"(in) : "memory"); }
else if (b == 69) {
  int ready = 0;
  asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(ready) : "l"(in) : "memory");
  if (ready) out[t] = in[64 + t];
}""")
    for change, right in (("", True), (".release.gpu", False), (".acquire.gpu", False)):
        arrays = np.zeros(64 * 2, np.int32), np.zeros(64 * 2, np.int32)
        text = source.replace(change, ".relaxed.gpu") if change else source
        faults = run_cuda(text, *arrays, blocks=BLOCKS, threads=THREADS).faults
        assert (not faults) == right and (arrays[0][:64] == range(64)).all(), faults


READ_ONLY = """
extern "C" __global__ void k(float* out, float* in) {{
  const int t = threadIdx.x;
  {before}
  float seen; asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(seen) : "l"(in + t));
  {after}
  out[t] = seen;
}}"""


@pytest.mark.parametrize(
    "before, after, words",
    [
        ("", "", None),
        ("", "in[64 + t] = 3.f;", None),  # of the same buffer, but not of what was read
        ("in[t] = 3.f; __syncthreads();", "", "what this launch has written"),
        ("", "__syncthreads(); in[t] = 3.f;", "writes what ld.global.nc has read"),
    ],
)
def test_what_is_read_as_read_only_is_not_written_by_the_same_launch(before, after, words):
    """In whatever order: the compiler, or the cache, may have read it long before."""
    values = np.arange(128, dtype=np.float32)
    execution = run_cuda(READ_ONLY.format(before=before, after=after), np.zeros(64, np.float32), values, threads=64)
    assert execution.faults == () if words is None else words in execution.faults[0]
