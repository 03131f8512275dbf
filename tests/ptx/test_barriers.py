"""mbarriers: phases, who waits for what, and wrong use. Barriers of a given count: neither more nor fewer threads than
that, and phases that cannot mix. Threads that read memory until others have written there: the others go first, and
who polls for ever is found."""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_cuda, run_hopper, run_ptx

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


def run_polling(source, poll, give=GIVE, other="b - 1", **options):
    out, flags = np.zeros(BLOCKS * 64, np.int32), np.zeros(BLOCKS, np.uint32)
    text = source.replace("POLL", POLLS[poll]).replace("GIVE", give).replace("OTHER", other)
    return out.reshape(BLOCKS, 64), run_cuda(text, out, flags, blocks=BLOCKS, threads=THREADS, **options)


@pytest.mark.parametrize("poll", POLLS)
def test_those_polled_for_go_first(poll):
    out, execution = run_polling(INSIDE, poll)
    assert not execution.faults and (out == np.arange(BLOCKS)[:, None]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "expected"), [("b - 1", np.cumsum(range(BLOCKS))), ("b + 1", np.cumsum(range(BLOCKS)[::-1])[::-1])]
)
@pytest.mark.parametrize("poll", POLLS)
def test_blocks_that_run_together_poll_for_each_other(poll, other, expected):
    """Also a block for one after it, which has not begun when the polling does."""
    out, execution = run_polling(CHAIN, poll, other=other)
    assert not execution.faults and (out == np.asarray(expected)[:, None]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("source", "poll"), [*((CHAIN, poll) for poll in POLLS), (INSIDE, "ld.acquire")])
def test_polls_in_vain_are_a_deadlock(source, poll):
    [fault] = run_polling(source, poll, give=";")[1].faults
    assert "is deadlocked: threads poll from" in fault and "all others wait or have ended" in fault


def test_blocks_that_poll_for_each_other_are_a_deadlock():
    [fault] = run_polling(CHAIN, "atom.acquire", other="(b + 1) % n")[1].faults
    assert "threads poll from" in fault


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("other", ["b - 1", "b + 1"])
def test_who_does_not_wait_is_found_where_blocks_begin_late(other):
    """Block 0 or 3 begins when the others have polled for long, or have taken what is not there."""
    polls = POLLS["atom.acquire"]
    assert not run_polling(CHAIN, "atom.acquire", other=other, late_blocks=True)[1].faults
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


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_who_waits_for_some_time_gives_up_where_blocks_begin_late(late):
    flags = np.zeros(1, np.uint32)
    assert not run_cuda(GIVES_UP, flags, blocks=5, threads=32, late_blocks=late).faults
    assert flags[0] == 5 | late << 31
