"""Faults of times that once passed the tests: a graph's own launch in a call's time, energy over too many calls."""

import pytest

from evoattn.timing.contestant import PROBE_US, Contestant
from evoattn.timing.energy import energy_per_call
from tests.timing.device_clock import DeviceClock
from tests.timing.test_contestant import enter


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
