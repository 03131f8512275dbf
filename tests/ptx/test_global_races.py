"""Races in global memory between blocks, whatever order they run in, and what orders them."""

import numpy as np
import pytest

from tests.ptx.golden.harness import cuda_kernel, launch, run_cuda

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
