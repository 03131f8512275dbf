"""How many calls a graph has, and what a call takes: by the device's clock, whatever the call costs on the CPU."""

import pytest
import torch

from evoattn.model.records import Timing
from evoattn.timing import benchmark
from evoattn.timing.clocks import Clocks
from evoattn.timing.contest import energy_per_call
from evoattn.timing.contestant import (
    LAUNCH_SHARE,
    PROBE_MOST,
    PROBE_US,
    Contestant,
    calls_for,
    calls_for_all,
    calls_to_screen,
)
from evoattn.timing.protocol import FINAL, SCREEN, Protocol
from evoattn.timing.ranking import against_leader
from evoattn.timing.timer import Timer
from tests.timing.device_clock import DeviceClock


class NoWatch:
    def before(self):
        pass

    def after(self):
        pass


def enter(clock, **calls):
    """Contestants by name, each of (µs on the device, µs of Python)."""
    entered = [Contestant(n, clock.call(us, python_us), clock, NoWatch()) for n, (us, python_us) in calls.items()]
    for contestant in entered:
        contestant.probe()
    return entered


def final(clock, **calls):
    contestants = enter(clock, **calls)
    count = calls_for_all(contestants, clock.launch_us, FINAL, "warm")
    for contestant in contestants:
        contestant.capture(count)
    return benchmark.measure(contestants, FINAL, "warm", Clocks("none"))


@pytest.mark.parametrize("us", [2.0, 7.0, 40.0, 900.0, 30_000.0])
def test_a_call_that_costs_a_millisecond_of_python_has_the_same_time(us):
    timings = final(DeviceClock(), quick=(us, 5.0), slow=(us, 1000.0))
    quick, slow = timings["quick"], timings["slow"]
    assert quick.samples_us == slow.samples_us
    assert us <= slow.median_us <= us * (1 + LAUNCH_SHARE)
    assert quick.protocol["calls_per_replay"] == slow.protocol["calls_per_replay"]


def test_the_fastest_says_how_many_calls_all_have():
    timings = final(DeviceClock(), fast=(2.0, 1000.0), slower=(60.0, 5.0), slowest=(900.0, 5.0))
    assert len({t.protocol["calls_per_replay"] for t in timings.values()}) == 1
    assert timings["fast"].protocol["calls_per_replay"] >= FINAL.replay_us / 2.5


def test_what_a_call_takes_is_found_by_replay():
    clock = DeviceClock()
    for us in (0.5, 3.0, 20.0, 150.0, 4000.0):
        for python_us in (3.0, 1000.0):
            assert enter(clock, a=(us, python_us))[0].us == pytest.approx(us, rel=0.02)


@pytest.mark.parametrize(
    "us, launch_us, protocol, cache, calls",
    [
        (300.0, 1.0, SCREEN, "warm", 2),
        (1e9, 1.0, SCREEN, "warm", 1),
        (5.0, 1.0, SCREEN, "cold", 1),
        (5.0, 1.0, SCREEN, "warm", 100),
        (5.0, 10.0, SCREEN, "warm", 400),
        (0.0, 1.0, SCREEN, "warm", SCREEN.most_calls),
        (5.0, 1.0, Protocol("final", 25, 1000.0, most_calls=7), "warm", 7),
    ],
)
def test_a_replay_is_long_enough_for_the_protocol_and_for_its_launch(us, launch_us, protocol, cache, calls):
    assert calls_for(us, launch_us, protocol, cache) == calls


@pytest.mark.parametrize("us", [2.0, 15.0, 80.0, 3000.0])
@pytest.mark.parametrize("python_us", [5.0, 25.0])
def test_a_candidate_as_fast_as_the_best_is_screened_with_a_launch_that_does_not_show(us, python_us):
    clock = DeviceClock()
    one = Contestant("a", clock.call(us, python_us), clock, NoWatch())
    one.capture(calls_to_screen(one.us, us, clock.launch_us, "warm"))
    assert us <= min(one.samples(2)) <= us * (1 + LAUNCH_SHARE)


def test_a_long_call_is_not_repeated_for_the_sake_of_a_short_best():
    assert calls_to_screen(5000.0, 2.0, 3.0, "warm") == 2
    assert calls_to_screen(5000.0, None, 3.0, "warm") == 1


def test_samples_are_queued_and_what_surrounds_them_is_not_timed():
    clock, order = DeviceClock(), []

    class Surroundings:
        def before(self):
            order.append("before")
            clock.run(70.0)

        def after(self):
            order.append("after")
            clock.run(90.0)

    def flush():
        order.append("flush")
        clock.run(200.0)

    one = Contestant("a", clock.call(50.0, 5.0), clock, Surroundings(), flush)
    one.capture(10)
    assert one.samples(3) == pytest.approx([50.0 + clock.own_us / 10] * 3)
    assert order == ["before", "flush", "after"] * 3


def test_elapsed_time_is_that_of_the_work_alone_and_is_waited_for():
    order, now = [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")
            self.at = now[0]

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3  # in milliseconds, as CUDA's

    def work():
        order.append("work")
        now[0] += 40.0

    timer = Timer(make_event=Event, make_graph=lambda: None)
    assert timer.elapsed_us(work) == 40.0
    waits = [timer.queue(work) for _ in range(2)]
    now[0] += 5.0
    assert [wait() for wait in waits] == [40.0, 40.0]
    assert order == ["record", "work", "record", "wait"] + ["record", "work", "record"] * 2 + ["wait"] * 2


def test_energy_is_the_counter_s_over_whole_steps_of_it():
    clock = DeviceClock()
    one = Contestant("a", clock.call(20.0, 5.0), clock, NoWatch())
    one.capture(50)

    def read():
        return int(clock.gpu // 50_000) * 15_000  # 300 W, in steps of 50 ms

    def now():
        return clock.cpu / 1e6

    energy = energy_per_call(one, read, clock.synchronize, now)
    assert energy == pytest.approx(300.0 * 20e-6 * 1e3, rel=0.03)
    assert energy_per_call(one, lambda: None, clock.synchronize, now) is None
    assert energy_per_call(one, lambda: 7, clock.synchronize, now) is None


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_a_millisecond_of_python_does_not_show():
    import time

    x = torch.zeros(1 << 20, device="cuda")

    def quick():
        x.add_(1)

    def slow():
        time.sleep(1e-3)
        x.add_(1)

    timer = Timer()
    contestants = [Contestant(name, call, timer, NoWatch()) for name, call in (("quick", quick), ("slow", slow))]
    for contestant in contestants:
        contestant.probe()
    count = calls_for_all(contestants, timer.launch_us, FINAL, "warm")
    for contestant in contestants:
        contestant.capture(count)
    timings = benchmark.measure(contestants, FINAL, "warm", Clocks(str(torch.cuda.get_device_properties(0).uuid)))
    assert timings["slow"].median_us == pytest.approx(timings["quick"].median_us, rel=0.01)
    assert count * timings["quick"].median_us > PROBE_US


def test_the_probe_of_a_call_that_takes_no_time_ends():
    (one,) = enter(DeviceClock(), nothing=(0.0, 1.0))
    assert one.calls == PROBE_MOST and one.us < 0.1


def test_a_long_call_is_run_once_between_readings_of_the_counter():
    clock, runs, at = DeviceClock(), [], []
    one = Contestant("a", clock.call(1e6, 5.0), clock, NoWatch())
    one.capture(1)
    one.us, replay = 1e6, one.replay
    one.replay = lambda: runs.append(1) or replay()

    def read():
        at.append(len(runs))
        return 100 * len(runs)

    assert energy_per_call(one, read, clock.synchronize, lambda: clock.cpu / 1e6) == pytest.approx(100.0)
    assert at == list(range(len(at))) and len(at) > 2


def test_ranks_of_a_leader_alone_are_none():
    alone = Timing((1.0,) * 9, {"run": "r"})
    assert against_leader({1: alone}, 1) == {}
