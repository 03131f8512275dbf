"""The timer without a device: nothing is collected while a graph is captured, nothing is timed twice or counted too
often, and a watch says which replays did wrong."""

import gc

import pytest
import torch

from evoattn.correctness.arena import POISON_BYTE, Arena, Layout
from evoattn.timing.contest import energy_per_call
from evoattn.timing.contestant import PROBE_US, Contestant, ReplayWatch
from evoattn.timing.timer import Timer
from tests.timing.device_clock import DeviceClock
from tests.timing.test_contestant import enter


class FakeGraph:
    def capture_begin(self):
        assert not gc.isenabled()

    def capture_end(self):
        assert not gc.isenabled()

    def replay(self):
        return "replayed"


def test_no_garbage_is_collected_during_a_capture():
    timer, seen = Timer(make_event=lambda **_: None, make_graph=FakeGraph), []
    assert gc.isenabled()
    assert timer.capture([lambda: seen.append(gc.isenabled())] * 2)() == "replayed" and seen == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timer.capture([lambda: 1 / 0])
    assert gc.isenabled()
    gc.disable()
    try:
        timer.capture([])
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()


def test_a_watch_counts_the_replays_that_did_wrong():
    inputs = {"q": torch.ones(4)}
    arena = Arena(inputs, {"o": Layout((4,), (1,), torch.float32)}, {}, torch.device("cpu"))
    right = torch.full((4,), 2.0)

    def replays(*plays, expected=right, unordered=()):
        watch = ReplayWatch(arena, None if expected is None else {"o": expected}, unordered)
        for play in plays:
            watch.before()
            arena.views["o"].copy_(right)
            play()
            watch.after()
        return watch.fault()

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

    new_rows = right.clone()  # of a cache
    new_rows[:2].view(torch.uint8).fill_(POISON_BYTE)

    def leaves_the_others():
        arena.poison()
        arena.views["o"][2:] = 2.0

    assert replays(leaves_the_others, expected=new_rows) == ""
    assert replays(honest, expected=new_rows) and "unwritten" in replays(leaves_it, expected=new_rows)

    def is_near():
        arena.views["o"][2] += 1e-5

    assert replays(is_near) and replays(is_near, unordered=("o",)) == ""
    assert replays(is_off, unordered=("o",)) == "1 of 1 timed replays left another output than the validated one."


def test_the_launch_of_a_graph_is_no_part_of_a_call():
    clock = DeviceClock()
    clock.own_us = clock.launch_us = PROBE_US / 2
    for us in (PROBE_US / 8, 1.5 * PROBE_US):
        assert enter(clock, a=(us, 3.0))[0].us == pytest.approx(us, rel=0.02)


def test_calls_behind_the_counter_s_last_step_do_not_count():
    clock = DeviceClock()
    one = Contestant("a", clock.call(20.0, 5.0), clock, None)
    one.capture(50)
    began = clock.gpu

    def read():
        """300 W in steps of 50 ms, of which the fourth never comes."""
        return min(3, int((clock.gpu - began) // 50_000)) * 15_000

    energy = energy_per_call(one, read, clock.synchronize, lambda: clock.cpu / 1e6)
    assert energy == pytest.approx(300.0 * 20e-6 * 1e3, rel=0.06)
