"""What is timed, in which order and how often, without a device."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from evoattn.correctness.arena import Arena, Layout
from evoattn.timing import benchmark
from evoattn.timing.clocks import Clocks
from evoattn.timing.protocol import FINAL, SCREEN, Protocol


class Fake:
    """A contestant whose samples are what a clock makes of them."""

    calls = 1

    def __init__(self, name, samples):
        self.name, self._samples = name, iter(samples)

    def sample(self):
        return next(self._samples)


class FakeClocks(Clocks):
    def __init__(self, mhz):
        self.absent, self._mhz = "", iter(mhz)

    def read(self, at_most_old=0.0):
        return SimpleNamespace(sm_mhz=next(self._mhz))

    def record(self, at_most_old=0.0):
        return {}


def test_a_round_of_the_final_in_which_the_clock_dropped_is_run_again():
    mhz = [1980, 1980, 1980, 1500] + [1980] * 200  # the first reading is whether there is a clock
    timings = benchmark.measure([Fake("a", range(100)), Fake("b", range(100))], FINAL, "warm", FakeClocks(mhz))
    assert timings["a"].samples_us == (0, *range(2, FINAL.samples + 1)) == timings["b"].samples_us
    assert timings["a"].protocol["rounds_repeated"] == 1 and timings["a"].protocol["sm_mhz"] == [1500, 1980]


def test_a_gpu_that_throttles_all_the_time_is_timed_as_it_is():
    mhz = [1980] + [v for n in range(200) for v in [1400 if n % 3 == 2 else 1980]]
    timings = benchmark.measure([Fake("a", range(100))], FINAL, "warm", FakeClocks(mhz))
    assert len(timings["a"].samples_us) == FINAL.samples
    assert timings["a"].protocol["rounds_repeated"] == int(benchmark.MAX_REPEATED * FINAL.samples)


def test_without_nvml_the_record_says_so():
    clocks = Clocks("no such device")
    assert clocks.read() is None and clocks.record()["absent"].endswith(".")
    timing = benchmark.measure([Fake("a", range(9))], SCREEN, "warm", clocks)["a"]
    assert timing.protocol["clocks"] == clocks.record() and "rounds_repeated" not in timing.protocol


class FakeEvents:
    """Makes events that are written down as they are recorded; the device's clock stands at `now` µs."""

    def __init__(self):
        self.now, self.order, self.names = 0.0, [], iter(["start", "end"])

    def __call__(self, enable_timing):
        assert enable_timing
        return FakeEvent(self, next(self.names))


class FakeEvent:
    def __init__(self, events, name):
        self._events, self._name, self._at = events, name, None

    def record(self):
        self._events.order.append(f"record {self._name}")
        self._at = self._events.now

    def synchronize(self):
        self._events.order.append(f"wait for {self._name}")

    def elapsed_time(self, end):
        """In milliseconds, as CUDA's."""
        return (end._at - self._at) / 1e3


def test_elapsed_time_is_that_of_the_work_alone_and_is_waited_for():
    events = FakeEvents()
    timer = benchmark.Timer(make_event=events, make_graph=lambda: None)

    def work():
        events.order.append("work")
        events.now += 40.0

    assert timer.elapsed_us(work) == 40.0
    events.now += 5.0
    assert timer.elapsed_us(work) == 40.0
    assert events.order == ["record start", "work", "record end", "wait for end"] * 2


class FakeTimer(benchmark.Timer):
    """Each call takes what `us` says of it, by the number of calls so far."""

    def __init__(self, us):
        self._us, self.count, self.order = us, 0, []

    def enqueue(self):
        self.count += 1

    def elapsed_us(self, work):
        before = self.count
        work()
        self.order.append("timed")
        return sum(self._us(n) for n in range(before, self.count))

    @contextmanager
    def side_stream(self):
        self.order.append("side stream")
        yield
        self.order.append("main stream")

    def capture(self, calls):
        assert self.order[-1] != "main stream"

        def replay():
            self.order.append("replay")
            for call in calls:
                call()

        return replay

    def synchronize(self):
        self.order.append("wait")


def contestant(timer, cache="warm", protocol=SCREEN, flush=None, witness=None):
    return benchmark.Contestant("a", timer.enqueue, protocol, cache, timer, witness, flush)


def test_the_first_call_is_no_estimate_and_the_graph_has_run_once_before_it_is_timed():
    timer = FakeTimer(lambda n: (900.0, 70.0, 50.0)[n] if n < 3 else 50.0)
    one = contestant(timer)
    assert (one.estimate_us, one.calls) == (50.0, 10)  # `SCREEN.replay_us` / 50
    assert timer.order == ["side stream", "timed", "timed", "main stream", "replay", "wait"]
    assert timer.count == 3 + 10


@pytest.mark.parametrize(
    "us, cache, calls",
    [(1e9, "warm", 1), (0.01, "warm", SCREEN.max_calls), (300.0, "warm", 1), (200.0, "warm", 2), (5.0, "cold", 1)],
)
def test_a_replay_is_as_many_calls_as_the_protocol_has_time_for(us, cache, calls):
    assert contestant(FakeTimer(lambda n: us), cache).calls == calls


def test_a_call_of_less_than_a_microsecond_counts_as_one():
    assert contestant(FakeTimer(lambda n: 0.0), protocol=Protocol("screen", 5, 20.0)).calls == 20


def test_a_sample_is_per_call_and_what_surrounds_it_is_not_timed():
    timer = FakeTimer(lambda n: 50.0)
    witness = SimpleNamespace(before=lambda: timer.order.append("before"), after=lambda: timer.order.append("after"))
    one = contestant(timer, flush=lambda: timer.order.append("flush"), witness=witness)
    timer.order.clear()
    assert one.sample() == 50.0
    assert timer.order == ["before", "flush", "replay", "timed", "after"]


def test_a_witness_counts_the_replays_that_did_wrong():
    inputs = {"q": torch.ones(4)}
    arena = Arena(inputs, {"o": Layout((4,), (1,), torch.float32)}, {}, torch.device("cpu"))
    right = torch.full((4,), 2.0)

    def replays(*plays, expected=right):
        witness = benchmark.Witness(arena, None if expected is None else {"o": expected})
        for play in plays:
            witness.before()
            arena.views["o"].copy_(right)
            play()
            witness.after()
        return witness.fault()

    def honest():
        pass

    def changes_the_input():
        arena.views["q"][1:3] = 7.0

    def leaves_it():
        arena.poison()

    def is_off():
        arena.views["o"][2] = 2.5

    assert replays(honest, honest) == ""
    assert replays(honest, changes_the_input, honest, leaves_it) == "1 of 4 timed replays changed the inputs."
    assert replays(leaves_it, leaves_it, is_off).startswith("2 of 3 timed replays left outputs unwritten: ")
    assert replays(is_off, honest) == "1 of 2 timed replays left another output than the validated one."
    assert replays(leaves_it, expected=None) == ""


def test_each_contestant_once_a_round_in_a_shuffled_order_that_the_seed_gives():
    names = ["a", "b", "c", "d"]

    def order(seed):
        turns = []
        fakes = [Fake(name, range(100)) for name in names]
        measured = benchmark.measure(fakes, SCREEN, "cold", Clocks("none"), 6, seed, turns.append)
        assert all(t.samples_us == tuple(range(6)) for t in measured.values())
        assert {t.protocol["contestants"] for t in measured.values()} == {4}
        assert {
            (t.protocol["stage"], t.protocol["cache"], t.protocol["calls_per_replay"]) for t in measured.values()
        } == {("screen", "cold", 1)}
        return turns

    turns = order(1)
    rounds = [tuple(turns[n : n + 4]) for n in range(0, 24, 4)]
    assert all(sorted(one) == names for one in rounds) and len(set(rounds)) > 1
    assert order(1) == turns != order(2)


def test_clocks_are_watched_in_the_final_alone():
    mhz = [1980, 1980, 1000, 1980]  # a screening asks for none
    timings = benchmark.measure([Fake("a", range(9))], SCREEN, "warm", FakeClocks(mhz), 5)
    assert timings["a"].samples_us == tuple(range(5)) and "rounds_repeated" not in timings["a"].protocol


@pytest.mark.parametrize("dropped, repeated", [(0.98, 0), (benchmark.CLOCK_DROP, 0), (0.96, 1)])
def test_a_round_is_repeated_below_the_share_of_the_median_clock(dropped, repeated):
    mhz = [1000, 1000, 1000, 1000 * dropped] + [1000] * 30
    timing = benchmark.measure([Fake("a", range(99))], FINAL, "warm", FakeClocks(mhz))["a"]
    assert timing.protocol["rounds_repeated"] == repeated and len(timing.samples_us) == FINAL.samples


def test_the_slowest_clock_of_a_round_counts_whoever_s_turn_it_was():
    for slow in ([1000, 500], [500, 1000]):
        mhz = [1000] + [1000] * 4 + slow + [1000] * 200
        timings = benchmark.measure([Fake("a", range(99)), Fake("b", range(99))], FINAL, "warm", FakeClocks(mhz))
        assert timings["a"].samples_us == (0, 1, *range(3, FINAL.samples + 1))


def test_a_replay_that_fails_says_whose_it_was():
    class Failing(Fake):
        def sample(self):
            raise RuntimeError("An illegal address.")

    with pytest.raises(benchmark.ContestantFailed, match="illegal address") as failure:
        benchmark.measure([Fake("a", range(9)), Failing("b", ())], SCREEN, "warm", Clocks("none"))
    assert failure.value.name == "b" and failure.value.error is failure.value.__cause__
