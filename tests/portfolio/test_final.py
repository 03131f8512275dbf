"""What the engine's GPU process does around a launch: memory for every problem, repeated calls, finals in turns."""

import gc
from contextlib import contextmanager

import pytest
import torch

from evoattn.backends.base import LaunchError
from evoattn.model.shape_text import parse_shape
from evoattn.peers.table import PEERS, Peer
from evoattn.portfolio.engine.clock import DIRECT_CALLS, GRAPH_UNDER_US, Clock, Repeated, repeat
from evoattn.portfolio.engine.final import Final
from evoattn.portfolio.engine.memory import Memory
from evoattn.timing.timer import Timer

SMALL, LARGE = (parse_shape(f"B=1,H=2,S={n},D=64,dtype=fp16,mask=full") for n in (100, 300))


class CpuBackend:
    device = torch.device("cpu")

    def prepare(self, compiled, launches, buffers):
        return lambda: compiled(buffers)


class Kernel:
    """Stands where a `BuiltKernel` stands; `us` is what a call takes, None that it does not launch."""

    def __init__(self, us=None, sizes=()):
        self.us, self.sizes, self.buffers, self.calls = us, dict(sizes), {}, 0

    def compiled(self, buffers):
        if self.us is None:
            raise LaunchError("no")
        self.buffers = buffers
        self.calls += 1
        Stopwatch.passed += self.us

    def workspace(self, problem):
        return self.sizes

    def launches(self, problem):
        return ()


class Stopwatch(Clock):
    """Counts what the fakes say that they take."""

    passed = 0.0

    def __init__(self):
        pass

    def elapsed(self, work):
        before = Stopwatch.passed
        work()
        return Stopwatch.passed - before


@pytest.mark.parametrize("us, calls", ((20, 3), (900, 3), (20_000, 2)))
def test_a_launch_that_the_cpu_was_late_with_is_no_estimate_but_of_calls_that_take_longer_anyhow(us, calls):
    made = []

    def call():
        made.append(us)
        Stopwatch.passed += us + (3000 if len(made) == 2 and us < 10_000 else 0)  # the first only loads the kernel

    assert Stopwatch().first(call) == pytest.approx(us) and len(made) == calls


@pytest.fixture
def memory():
    made = Memory(CpuBackend(), seed=0)
    for problem in (SMALL, LARGE):
        made.reserve(problem)
    return made


def test_a_problem_has_its_shapes_apart_and_shares_memory_with_the_others(memory):
    small, large = memory.tensors(SMALL), memory.tensors(LARGE)
    assert {name: t.shape for name, t in large.items()} == {name: LARGE.shape(name) for name in "qkvo"}
    ends = [t.data_ptr() + t.nbytes for t in large.values()]
    assert all(end <= large[name].data_ptr() for end, name in zip(ends, "kv"))
    assert small["q"].data_ptr() == large["q"].data_ptr() and small["o"].data_ptr() == large["o"].data_ptr()
    assert 0.9 < float(large["v"].float().std()) < 1.1


def test_scratch_that_must_start_as_zeros_does(memory):
    kernel = Kernel(us=1.0, sizes={"counters_zeroed": 4096, "partial": 8})
    memory.prepare(kernel, SMALL)()
    assert not kernel.buffers["counters_zeroed"].any() and kernel.buffers["counters_zeroed"].numel() == 4096
    assert kernel.buffers["partial"].numel() == 16


@pytest.mark.parametrize(("first_us", "calls"), [(GRAPH_UNDER_US, 4), (400.0, 3), (1e6, DIRECT_CALLS[0])])
def test_a_long_call_is_repeated_for_about_a_millisecond(first_us, calls):
    made = []
    repeated = repeat(lambda: made.append(1), first_us, StopwatchTimer())
    repeated.work()
    assert repeated.calls == len(made) == calls


class Graph:
    """Knows whether garbage may be collected while it is captured."""

    def capture_begin(self):
        self.collects = gc.isenabled()

    def capture_end(self):
        self.collects = self.collects or gc.isenabled()

    def replay(self):
        assert not self.collects, "garbage may be modules, which cannot be unloaded during a capture"
        return "replayed"


def test_short_calls_become_a_graph_and_no_garbage_is_collected_meanwhile():
    seen = []
    repeated = repeat(lambda: seen.append(gc.isenabled()), 20.0, Timer(make_graph=Graph))
    assert repeated.calls == len(seen) == 60 and not any(seen)
    assert repeated.work() == "replayed" and gc.isenabled()


def test_a_call_is_the_mean_over_the_work():
    kernel = Kernel(us=50.0)
    loop = Repeated(lambda: [kernel.compiled({}) for _ in range(4)], 4)
    assert Stopwatch().a_call(loop) == 50.0


class StopwatchTimer(Timer):
    launch_us = 0.0

    def __init__(self):
        pass

    def queue(self, work):
        took = Stopwatch().elapsed(work)
        return lambda: took

    @contextmanager
    def side_stream(self):
        yield

    def capture(self, calls):
        return lambda: [call() for call in calls]

    def synchronize(self):
        pass


def test_a_final_leaves_out_what_fails_and_does_not_repeat_what_is_far_behind(memory):
    near, far, broken = Kernel(us=400.0), Kernel(us=2000.0), Kernel()
    final = Final(memory, StopwatchTimer(), LARGE)
    ours, peers, refusals = final.run([near, far, broken], ("nobody",), 3, seed=1)
    assert final.samples == {"0": [400.0] * 3}
    assert ours[:2] == [400.0, 2000.0] and ours[2] is None
    assert peers == {} and list(refusals) == ["nobody"]
    assert far.calls == 3 and near.calls > 3 * 2 * 2  # three rounds of a replay and the one before it, two calls each


@pytest.mark.slow
def test_a_peer_takes_part_if_its_answer_is_right(memory):
    def peer(make):
        return Peer(make, "torch")

    def wrong(problem, tensors):
        return lambda: torch.zeros(problem.shape("o"), dtype=torch.float16)

    def absent(problem, tensors):
        raise ImportError("no such module")

    table = {"right": PEERS["math"], "wrong": peer(wrong), "absent": peer(absent)}
    final = Final(memory, StopwatchTimer(), LARGE, table)
    _, peers, refusals = final.run([Kernel(us=400.0)], tuple(table), 3, seed=1)
    assert list(peers) == ["right"]
    assert "answer is wrong" in refusals["wrong"] and "not installed" in refusals["absent"]


def test_kernels_and_peers_have_the_same_tensors(memory):
    """Where K and V lie decides some per cent of a time that is bound by memory."""
    given = []

    def make(problem, tensors):
        given.append(tensors)
        return lambda: torch.zeros(problem.shape("o"), dtype=torch.float16)

    kernel = Kernel(us=400.0)
    Final(memory, StopwatchTimer(), SMALL, {"peer": Peer(make, "torch")}).run([kernel], ("peer",), 1, seed=1)
    assert [kernel.buffers[name].data_ptr() for name in "qkv"] == [given[0][name].data_ptr() for name in "qkv"]


class Late(Kernel):
    """The CPU is late with its second call."""

    def compiled(self, buffers):
        super().compiled(buffers)
        Stopwatch.passed += 3000.0 if self.calls == 2 else 0.0


def test_a_call_that_the_cpu_was_late_with_is_made_again(memory):
    ours, _, _ = Final(memory, StopwatchTimer(), LARGE).run([Kernel(us=20.0), Late(us=18.0)], (), 3, seed=1)
    assert ours == [20.0, 18.0]


def test_all_in_a_final_are_called_as_often(memory):
    quick, slower = Kernel(us=20.0), Kernel(us=28.0)
    Final(memory, StopwatchTimer(), LARGE).run([quick, slower], (), 1, seed=1)
    before = quick.calls, slower.calls
    ours, _, _ = Final(memory, StopwatchTimer(), LARGE).run([quick, slower], (), 3, seed=1)
    per_round = (quick.calls - 2 * before[0]) // 2, (slower.calls - 2 * before[1]) // 2
    assert ours == [20.0, 28.0] and per_round[0] == per_round[1] == 2 * 35


def test_what_its_probe_shows_far_behind_has_no_rounds(memory):
    near, behind = Kernel(us=20.0), Kernel(us=32.0)
    rounds = {}
    for count in (1, 3):
        near.calls = behind.calls = 0
        ours, _, _ = Final(memory, StopwatchTimer(), LARGE).run([near, behind], (), count, seed=1)
        rounds[count] = near.calls, behind.calls
    assert ours == [20.0, 32.0]
    assert rounds[3][0] > rounds[1][0] and rounds[3][1] == rounds[1][1]
