"""mbarriers: phases, who waits for what, and wrong use."""

import numpy as np
import pytest

from tests.ptx.golden.hopper import run_hopper

KERNEL = """
extern "C" __global__ void k(int* out) {
  __shared__ __align__(8) unsigned long storage[4]; __shared__ int data[128];
  const uint32_t barrier = shared_address(storage); const int t = threadIdx.x; uint64_t state = 0;
  BODY
}"""
INIT = "if (t == 0) mbarrier_init(barrier, {}); __syncthreads();"


def run(body, threads=64, out_size=128, **options):
    out = np.full(out_size, -1, np.int32)
    return out, run_hopper(KERNEL.replace("BODY", body), [out], threads=threads, **options)


def test_phases_alternate_and_hand_over_memory():
    """Two warps take turns for five rounds, each reading what the other wrote."""
    body = (
        INIT.format(64)
        + """
for (int round = 0; round < 5; round++) {
  data[t] = round * 100 + t; mbarrier_arrive(barrier); mbarrier_wait(barrier, 0);
  out[t] = data[t ^ 32];
  mbarrier_arrive(barrier); mbarrier_wait(barrier, 1);
}"""
    )
    out, execution = run(body)
    assert not execution.faults and np.array_equal(out[:64], 400 + (np.arange(64) ^ 32))
    faults = run(body.replace("mbarrier_wait(barrier, 0);", ""))[1].faults
    assert any("reads what thread" in fault for fault in faults)
    faults = run(body.replace("mbarrier_wait(barrier, 1);", ""))[1].faults
    assert any("has read" in fault for fault in faults)


def test_counts_states_and_generic_addresses():
    body = (
        INIT.format(66)
        + """
asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;" : "=l"(state) : "r"(barrier), "r"(t == 5 ? 3 : 1));
uint32_t done = 0;
while (!done)
  asm volatile("{ .reg .pred p; mbarrier.try_wait.b64 p, [%1], %2, 100; selp.b32 %0, 1, 0, p; "
    "}" : "=r"(done) : "l"(storage), "l"(state));
out[t] = mbarrier_try_wait(barrier, 0) + 10 * int(done);"""
    )
    out, execution = run(body)
    assert not execution.faults and (out[:64] == 11).all()


def test_a_test_does_not_wait_for_ever():
    """Both parities are asked before anybody arrives: the phase before the first counts as ended."""
    ask = """{{ uint32_t p; asm volatile("{{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; "
      "selp.b32 %0, 1, 0, p; }}"
      : "=r"(p) : "r"(barrier), "r"({}) : "memory"); out[t] = out[t] * 10 + p; }}"""
    both = ask.format(0) + ask.format(1)
    out, execution = run(INIT.format(64) + "out[t] = 0;" + both + "mbarrier_arrive(barrier);" + both)
    assert not execution.faults and (out[:64] % 100 == 10).all() and (out[:64] // 100 == 1).all()


@pytest.mark.slow
def test_waiting_costs_no_steps():
    """A warp waits while another runs a long loop: far fewer instructions than a waiting loop would spin."""
    body = (
        INIT.format(1)
        + """
if (t < 32) { mbarrier_wait(barrier, 0); out[t] = 1; }
else {
  int x = t; for (int i = 0; i < 2000; i++) x = x * 5 + out[64 + (x & 1)];
  out[t] = x; __syncwarp(); if (t == 32) mbarrier_arrive(barrier);
}"""
    )
    out, execution = run(body)
    assert not execution.faults and (out[:32] == 1).all()
    alone = run(body.replace("mbarrier_wait(barrier, 0);", ""))[1]
    assert execution.steps - alone.steps < 50


@pytest.mark.parametrize(
    "body, words",
    [
        (
            INIT.format(65) + "mbarrier_arrive(barrier); mbarrier_wait(barrier, 0);",
            "which lacks 1 arrivals and 0 bytes",
        ),
        (
            INIT.format(64) + "mbarrier_arrive_expect_tx(barrier, t == 0 ? 16 : 0); mbarrier_wait(barrier, 0);",
            "lacks 0 arrivals and 16 bytes",
        ),
        (INIT.format(63) + "mbarrier_arrive_expect_tx(barrier, 16);", "an arrival over the 63"),
        ("mbarrier_arrive(barrier);", "no initialised mbarrier"),
        (INIT.format(64) + "mbarrier_wait(barrier + 8, 0);", "no initialised mbarrier"),
        (
            INIT.format(64)
            + 'if (t == 0) asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(barrier)); __syncthreads();'
            "mbarrier_arrive(barrier);",
            "no initialised",
        ),
        (INIT.format("out[t] + 1"), "of 0 arrivals"),
        (
            INIT.format(64) + "if (t == 0) storage[0] = 0; __syncthreads(); mbarrier_arrive(barrier);",
            "has been overwritten",
        ),
        ("if (t == 0) mbarrier_init(barrier, 64); mbarrier_arrive(barrier);", "initialised, with no barrier between"),
        (INIT.format(1) + "mbarrier_arrive_expect_tx(barrier, 1 << 20);", "over 1048575"),
        ("mbarrier_init(barrier, 1);", "initialises the mbarrier at byte 0 of shared memory again"),
    ],
)
def test_wrong_use(body, words):
    faults = run(body)[1].faults
    assert any(words in fault for fault in faults), faults


@pytest.mark.parametrize(
    "body, words",
    [
        ("decrease_registers<24>(); increase_registers<256>();", ""),
        ("if (threadIdx.x < 96) decrease_registers<24>();", "setmaxnreg"),
        (
            'asm volatile("griddepcontrol.wait;"); asm volatile("nanosleep.u32 20;"); '
            'asm volatile("griddepcontrol.launch_dependents;");',
            "",
        ),
    ],
)
def test_register_counts_are_a_matter_of_warpgroups(body, words):
    faults = run(body, threads=128)[1].faults
    assert not faults if not words else words in faults[0]


def test_an_election_and_a_named_barrier():
    body = """
uint32_t leader; asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(leader));
if (leader) data[t / 32] = t;
if (t < 64) named_barrier_arrive<128>(15); else named_barrier_sync<128>(15);
if (t >= 64) out[t] = data[0] + data[1];"""
    out, execution = run(body, threads=128)
    assert not execution.faults and (out[64:] == 32).all()


ALONE = (
    INIT.format(1)
    + """
if (t == 0) { data[0] = blockDim.x; mbarrier_arrive(barrier); }
if (t WAITS) mbarrier_wait(barrier, 0);
MEET
if (t >= 32) out[t] = data[0];"""
)


@pytest.mark.parametrize("waits, meet, right", [(">= 32", "", 1), ("== 32", "__syncwarp();", 1), ("== 32", "", 0)])
def test_what_one_lane_has_waited_for_its_warp_knows_once_it_has_met(waits, meet, right):
    execution = run(ALONE.replace("WAITS", waits).replace("MEET", meet))[1]
    assert bool(right) != any("reads what thread 0 wrote last" in fault for fault in execution.faults)


RELEASE = (
    INIT.format(1)
    + """
if (t < 32) { data[t] = t; MEET if (t == 0) mbarrier_arrive(barrier); }
else { mbarrier_wait(barrier, 0); out[t] = data[t - 32]; }"""
)


def test_a_lane_hands_on_what_its_warp_did_before_they_met():
    assert not run(RELEASE.replace("MEET", "__syncwarp();"))[1].faults
    faults = run(RELEASE.replace("MEET", ""))[1].faults
    assert any("reads what thread" in fault for fault in faults)


def test_who_arrives_knows_that_the_last_phase_has_ended():
    """Two arrivals make two phases here; in another order the second would come first."""
    body = INIT.format(1) + "if (t == 0) mbarrier_arrive(barrier); if (t == 32) { WAIT mbarrier_arrive(barrier); }"
    assert not run(body.replace("WAIT", "mbarrier_wait(barrier, 0);"))[1].faults
    faults = run(body.replace("WAIT", ""))[1].faults
    assert any("does not know that its last phase has ended" in fault for fault in faults), faults


TURNS = (
    INIT.format("1), mbarrier_init(barrier + 8, 1")
    + """
for (int round = 0; round < 3; round++) {
  if (t == 32) { if (round) mbarrier_wait(barrier, round % 2 ^ 1); mbarrier_arrive(barrier + 8); }
  if (t == 0) { WAIT mbarrier_arrive(barrier); }
}"""
)


def test_who_ends_a_phase_knows_that_all_have_seen_the_last():
    """Thread 32 sees each phase end here; a thread 0 that does not know may end the next one before it looks."""
    assert not run(TURNS.replace("WAIT", "mbarrier_wait(barrier + 8, round % 2);"))[1].faults
    faults = run(TURNS.replace("WAIT", ""))[1].faults
    assert any("may still wait for a phase" in fault for fault in faults), faults


def test_a_thread_that_waited_alone_meets_its_warp_before_aligned_instructions():
    body = (
        INIT.format(32)
        + """
if (t < 32) mbarrier_arrive(barrier);
if (t == 32) mbarrier_wait(barrier, 0);
MEET
asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");"""
    )
    assert not run(body.replace("MEET", "__syncwarp();"))[1].faults
    assert any("went their own way" in fault for fault in run(body.replace("MEET", ""))[1].faults)
