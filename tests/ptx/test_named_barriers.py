"""Barriers of a given count: neither more nor fewer threads than that, and phases that cannot mix."""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_cuda, run_ptx

EXCHANGE = """
extern "C" __global__ void k(float* out, const float* in) {{
  __shared__ float tile[128];
  const int t = threadIdx.x;
  tile[t] = in[t];
  {barrier}
  out[t] = tile[t ^ {partner}];
}}"""


def exchange(barrier, partner=64, threads=128):
    values, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    execution = run_cuda(EXCHANGE.format(barrier=barrier, partner=partner), out, values, threads=threads)
    right = (out == values[np.arange(128) ^ partner]).all()
    return execution.faults, right


@pytest.mark.parametrize(
    "barrier",
    [
        "__syncthreads();",
        'asm volatile("bar.sync 1, 128;" ::: "memory");',
        'asm volatile("bar.sync 1;" ::: "memory");',
        'asm volatile("barrier.sync.aligned 3, 128;" ::: "memory");',
    ],
)
def test_a_barrier_of_all_threads_is_one(barrier):
    assert exchange(barrier) == ((), True)


@pytest.mark.parametrize("count", [32, 64, 96])
def test_a_count_smaller_than_the_threads_that_come_is_a_fault(count):
    [fault] = exchange(f'asm volatile("bar.sync 1, {count};" ::: "memory");')[0]
    assert "128 threads of block 0 at barrier 1, in" in fault and f"which counts {count}." in fault


def test_a_count_larger_than_the_threads_that_come_is_a_deadlock():
    [fault] = exchange('asm volatile("bar.sync 1, 160;" ::: "memory");')[0]
    assert "deadlocked" in fault


@pytest.mark.parametrize("numbers, right", [("1 + t / 64", True), ("1", False)])
def test_groups_of_threads_need_numbers_of_their_own(numbers, right):
    """Two groups that share one number may meet each other instead of themselves."""
    barrier = f'asm volatile("bar.sync %0, 64;" :: "r"({numbers}) : "memory");'
    faults, answer = exchange(barrier, partner=32)
    assert (not faults and answer) if right else "which counts 64" in faults[0]


@pytest.mark.parametrize("number", ["t / 64 - 1", "int(in[0]) + 16"])
def test_a_block_has_sixteen_barriers(number):
    [fault] = exchange(f'asm volatile("bar.sync %0, 64;" :: "r"({number}) : "memory");')[0]
    assert "A block has no barrier" in fault


def test_groups_that_come_one_after_the_other_are_found_too():
    """The second group is held back until the first is through, so that the counts of this order of execution agree."""
    late = """
  if (t >= 64) asm volatile("bar.sync 2, 64;" ::: "memory");
  asm volatile("bar.sync 1, 64;" ::: "memory");"""
    [fault] = exchange(late, partner=32)[0]
    assert "may arrive at barrier 1 before its last phase has ended" in fault or "which counts 64" in fault


@pytest.mark.parametrize("number, right", [(1, True), (0, False)])
def test_some_warps_may_not_meet_at_the_barrier_of_the_block(number, right):
    """`__syncthreads()` is barrier 0: the other warps may come to it while some meet there."""
    some = f'if (t < 64) asm volatile("bar.sync {number}, 64;" ::: "memory"); __syncthreads();'
    faults, _ = exchange(some)
    assert not faults if right else "barrier 0" in faults[0]


def test_threads_must_agree_on_the_count():
    differing = 'if (t < 64) asm volatile("bar.arrive 1, 128;"); else asm volatile("bar.sync 1, 96;");'
    [fault] = exchange(differing)[0]
    assert "Threads count 128 and 96" in fault


HAND_OVER = """
mov.u32 %r0, 0; setp.lt.u32 %p0, %tid, 32; @!%p0 bra CONSUMER;
PRODUCER:
{before}
st.shared.u32 [tile], %r0; bar.arrive 1, 64;
add.u32 %r0, %r0, 1; setp.lt.u32 %p1, %r0, 3; @%p1 bra PRODUCER;
bra END;
CONSUMER:
bar.sync 1, 64; {after}
add.u32 %r0, %r0, 1; setp.lt.u32 %p1, %r0, 3; @%p1 bra CONSUMER;
END:
"""


def hand_over(before, after):
    body = HAND_OVER.format(before=before, after=after)
    return run_ptx(body, declarations=".shared .align 4 .b8 tile[4];", threads=64).faults


def test_a_producer_that_is_told_of_each_phase_is_right():
    """`full` (1) by the producer, `empty` (2) by the consumer, as a ring of one stage."""
    assert (
        hand_over("setp.eq.u32 %p2, %r0, 0; @!%p2 bar.sync 2, 64;", "setp.lt.u32 %p3, %r0, 2; @%p3 bar.arrive 2, 64;")
        == ()
    )


def test_a_producer_that_is_not_told_may_arrive_twice_in_a_phase():
    [fault] = [f for f in hand_over("", "") if "barrier 1" in f][:1]
    assert "before its last phase has ended" in fault or "which counts 64" in fault


@pytest.mark.parametrize("last, right", [("return;", False), ("", True)])
def test_a_barrier_orders_nothing_of_threads_that_have_ended(last, right):
    body = f"""
  if (t >= 64) {{ {last} }}
  asm volatile("bar.sync 0;" ::: "memory");
  if (t >= 64) return;"""
    faults, _ = exchange(body)
    assert not faults if right else "no barrier between" in faults[0]
