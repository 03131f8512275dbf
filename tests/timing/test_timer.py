"""The timer without a device: nothing is collected while a graph is captured, nothing is timed twice or counted too
often, and a watch says which replays did wrong. What is timed, in which order and how often, without a device."""

import gc
from types import SimpleNamespace

import pytest
import torch

from evoattn.correctness.arena import POISON_BYTE, Arena, Layout
from evoattn.timing import benchmark
from evoattn.timing.clocks import THROTTLE_REASONS, Clocks, Reading
from evoattn.timing.contest import energy_per_call
from evoattn.timing.contestant import PROBE_US, Contestant, ContestantFailed, ReplayWatch
from evoattn.timing.protocol import FINAL, SCREEN
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


class Fake:
    """A contestant whose samples are what a clock makes of them."""

    calls = 1

    def __init__(self, name, samples, us=1.0):
        self.name, self._samples, self.us = name, iter(samples), us

    def sample(self):
        return next(self._samples)


class FakeClocks(Clocks):
    def __init__(self, mhz):
        self.absent, self._mhz = "", iter(mhz)

    def read(self, at_most_old=0.0):
        mhz = next(self._mhz)
        hot = ("heat",) if mhz < 1600 else ()
        return SimpleNamespace(sm_mhz=mhz, power_w=mhz / 4, temperature_c=mhz // 40, throttled_by=hot)

    def record(self, at_most_old=0.0):
        return {}


def test_a_round_of_the_final_in_which_the_clock_dropped_is_run_again():
    mhz = [1980, 1980, 1980, 1500] + [1980] * 200  # the first reading is whether there is a clock
    timings = benchmark.measure([Fake("a", range(100)), Fake("b", range(100))], FINAL, "warm", FakeClocks(mhz))
    assert timings["a"].samples_us == (0, *range(2, FINAL.samples + 1)) == timings["b"].samples_us
    assert timings["a"].protocol["rounds_repeated"] == 1 and timings["a"].protocol["sm_mhz"] == [1500, 1980]


def test_a_final_says_how_fast_hot_and_loaded_the_board_was():
    mhz = [1980] + [1980, 1940] * 50
    protocol = benchmark.measure([Fake("a", range(100))], FINAL, "warm", FakeClocks(mhz))["a"].protocol
    assert (protocol["sm_mhz"], protocol["power_w"]) == ([1940, 1980], [485.0, 495.0])
    assert protocol["temperature_c"] == [48, 49] and protocol["throttled_by"] == []
    protocol = benchmark.measure([Fake("a", range(100))], FINAL, "warm", FakeClocks([1500] * 50))["a"].protocol
    assert protocol["throttled_by"] == ["heat"]


def test_whoever_is_far_behind_takes_part_in_a_few_rounds():
    fakes = [Fake("a", range(99), 10.0), Fake("near", range(99), 200.0), Fake("far", range(99), 201.0)]
    timings = benchmark.measure(fakes, FINAL, "warm", Clocks("none"))
    assert [len(timings[f.name].samples_us) for f in fakes] == [FINAL.samples, FINAL.samples, benchmark.FEW_ROUNDS]


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

    with pytest.raises(ContestantFailed, match="illegal address") as failure:
        benchmark.measure([Fake("a", range(9)), Failing("b", ())], SCREEN, "warm", Clocks("none"))
    assert failure.value.name == "b" and failure.value.error is failure.value.__cause__


def test_a_counter_of_energy_is_read_where_the_device_answers():
    clocks = Clocks("none")
    assert clocks.absent and clocks.energy_mj() is None
    clocks.absent, clocks._handle = "", "device 0"
    clocks._nvml = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"device 0": 17}[handle], NVMLError=RuntimeError
    )
    assert clocks.energy_mj() == 17
    clocks._nvml = SimpleNamespace(NVMLError=RuntimeError)  # a binding that lacks the call
    assert clocks.energy_mj() is None


def test_clocks_are_asked_each_of_its_own():
    """A driver that answers each question with another number."""
    clocks = Clocks("none")
    clocks.absent, clocks._handle = "", "device 0"
    reasons = list(THROTTLE_REASONS)
    clocks._nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM="SM",
        NVML_CLOCK_MEM="memory",
        NVML_TEMPERATURE_GPU="core",
        nvmlDeviceGetClockInfo=lambda handle, of: {("device 0", "SM"): 1980, ("device 0", "memory"): 2619}[handle, of],
        nvmlDeviceGetTemperature=lambda handle, of: {("device 0", "core"): 55}[handle, of],
        nvmlDeviceGetPowerUsage=lambda handle: {"device 0": 350_500}[handle],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: {"device 0": reasons[1]}[handle],
    )
    assert clocks._ask() == Reading(1980, 2619, 55, 350.5, (THROTTLE_REASONS[reasons[1]],))


def test_a_flush_overwrites_more_than_the_cache_on_its_device(monkeypatch):
    made = []
    limits = {"a device": SimpleNamespace(L2_cache_size=1000)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", limits.get)
    monkeypatch.setattr(torch, "empty", lambda *given, **words: made.append((given, words)) or torch.zeros(3))
    flush = benchmark.l2_flush("a device")
    assert made == [((1000 * benchmark.FLUSH_FACTOR,), {"dtype": torch.uint8, "device": "a device"})]
    filled = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: filled.append(value))
    flush()
    flush()
    assert len(filled) == 2


def test_one_alone_says_so_and_is_sampled_as_often_as_asked():
    class Alone(Fake):
        def samples(self, count):
            return [3.0] * count

    found = benchmark.screen(Alone("a", ()), SCREEN, "cold", Clocks("none"))
    assert found.samples_us == (3.0,) * SCREEN.samples and found.protocol["contestants"] == 1
    assert (found.protocol["stage"], found.protocol["cache"]) == ("screen", "cold")
    assert len(benchmark.screen(Alone("a", ()), SCREEN, "cold", Clocks("none"), 2).samples_us) == 2
    assert benchmark.measure([], FINAL, "warm", Clocks("none")) == {}
