"""What is timed, in which order and how often, without a device."""

from types import SimpleNamespace

from evoattn.timing import benchmark
from evoattn.timing.clocks import Clocks
from evoattn.timing.protocol import FINAL, SCREEN


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
