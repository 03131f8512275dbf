"""Threads that read memory until others have written there: the others go first, and who polls for ever is found."""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_cuda

BLOCKS, THREADS = 5, 64
WORK = "int sum = 0; for (int i = 0; i < 3000; ++i) sum = sum * 3 + i;"
POLLS = {
    "ld.acquire": (
        'do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); while (!seen);'
    ),
    "atom.acquire": (
        'do asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], 0;" : "=r"(seen) : "l"(flag) : "memory"); '
        "while (!seen);"
    ),
    "volatile and a fence": "do seen = *(volatile unsigned*)flag; while (seen == 0); __threadfence();",
}
GIVE = 'asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(flags + b) : "memory");'
# Each block hands a number to the block beside it: `other` says which block's flag it polls; the block at the end of
# the chain polls none.
CHAIN = f"""
extern "C" __global__ void k(int* out, unsigned* flags) {{
  const int t = threadIdx.x, b = blockIdx.x, n = gridDim.x, other = OTHER;
  int before = 0;
  if (other >= 0 && other < n) {{
    unsigned seen, *flag = flags + other;
    if (t == 0) POLL
    __syncthreads();                                // what thread 0 has acquired all may read
    before = out[other * 64 + t];
  }}
  {WORK}
  out[b * 64 + t] = before + b + (sum == 7 ? 1 : 0);
  __syncthreads();                                  // all numbers are written
  if (t == 0) GIVE
}}"""
# Warp 0, whose code comes first, polls for what warp 1 does afterwards.
INSIDE = f"""
extern "C" __global__ void k(int* out, unsigned* flags) {{
  const int t = threadIdx.x, b = blockIdx.x;
  if (t < 32) {{
    unsigned seen, *flag = flags + b;
    if (t == 0) POLL
    __syncwarp();
    out[b * 64 + t] = out[b * 64 + 32 + t];
  }} else {{
    {WORK}
    out[b * 64 + t] = b + (sum == 7 ? 1 : 0);
    __syncwarp();
    if (t == 32) GIVE
  }}
}}"""


def run(source, poll, give=GIVE, other="b - 1", **options):
    out, flags = np.zeros(BLOCKS * 64, np.int32), np.zeros(BLOCKS, np.uint32)
    text = source.replace("POLL", POLLS[poll]).replace("GIVE", give).replace("OTHER", other)
    return out.reshape(BLOCKS, 64), run_cuda(text, out, flags, blocks=BLOCKS, threads=THREADS, **options)


@pytest.mark.parametrize("poll", POLLS)
def test_those_polled_for_go_first(poll):
    out, execution = run(INSIDE, poll)
    assert not execution.faults and (out == np.arange(BLOCKS)[:, None]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "expected"), [("b - 1", np.cumsum(range(BLOCKS))), ("b + 1", np.cumsum(range(BLOCKS)[::-1])[::-1])]
)
@pytest.mark.parametrize("poll", POLLS)
def test_blocks_that_run_together_poll_for_each_other(poll, other, expected):
    """Also a block for one after it, which has not begun when the polling does."""
    out, execution = run(CHAIN, poll, other=other)
    assert not execution.faults and (out == np.asarray(expected)[:, None]).all()


@pytest.mark.parametrize(("source", "poll"), [*((CHAIN, poll) for poll in POLLS), (INSIDE, "ld.acquire")])
def test_polls_in_vain_are_a_deadlock(source, poll):
    [fault] = run(source, poll, give=";")[1].faults
    assert "is deadlocked: threads poll from" in fault and "all others wait or have ended" in fault


def test_blocks_that_poll_for_each_other_are_a_deadlock():
    [fault] = run(CHAIN, "atom.acquire", other="(b + 1) % n")[1].faults
    assert "threads poll from" in fault


def test_a_hand_over_without_order_is_a_race():
    for change in ((".acquire", ".relaxed"), (".release", ".relaxed")):
        text = (
            CHAIN.replace("POLL", POLLS["atom.acquire"])
            .replace("GIVE", GIVE)
            .replace("OTHER", "b - 1")
            .replace(*change)
        )
        faults = run_cuda(
            text, np.zeros(BLOCKS * 64, np.int32), np.zeros(BLOCKS, np.uint32), blocks=BLOCKS, threads=THREADS
        ).faults
        assert "Race in global memory" in faults[0]


@pytest.mark.parametrize("other", ["b - 1", "b + 1"])
def test_who_does_not_wait_is_found_where_blocks_begin_late(other):
    """Block 0 or 3 begins when the others have polled for long, or have taken what is not there."""
    polls = POLLS["atom.acquire"]
    assert not run(CHAIN, "atom.acquire", other=other, late_blocks=True)[1].faults
    text = CHAIN.replace("POLL", polls.replace("(!seen)", "(seen)")).replace("GIVE", GIVE).replace("OTHER", other)
    arrays = np.zeros(BLOCKS * 64, np.int32), np.zeros(BLOCKS, np.uint32)
    assert run_cuda(text, *arrays, blocks=BLOCKS, threads=THREADS, late_blocks=True).faults


GIVES_UP = """
extern "C" __global__ void k(unsigned* flags) {
  if (threadIdx.x > 0) return;
  unsigned seen, mark = 1u << 31;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(seen) : "l"(flags) : "memory");
  for (int look = 0; look < 4096; ++look) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flags) : "memory");
    if ((seen & 7) == gridDim.x) return;
  }
  atomicOr(flags, mark);
}"""


@pytest.mark.parametrize("late", [False, True])
def test_who_waits_for_some_time_gives_up_where_blocks_begin_late(late):
    flags = np.zeros(1, np.uint32)
    assert not run_cuda(GIVES_UP, flags, blocks=5, threads=32, late_blocks=late).faults
    assert flags[0] == 5 | late << 31
