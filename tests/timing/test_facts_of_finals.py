"""How long, how often and in what order is timed, who is ahead, and what a board takes, stays, until a change wants it
otherwise: on a clock that counts what fakes say that they take."""

import itertools
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Timing
from evoattn.timing import benchmark, contest, contestant, protocol, ranking, timed_run, timer
from evoattn.timing.clocks import THROTTLE_REASONS, Clocks
from evoattn.timing.protocol import FinalResult
from tests.support.facts import changed

PROTOCOLS = {name: value for name, value in vars(protocol).items() if isinstance(value, protocol.Protocol)}
NVML = SimpleNamespace(
    NVMLError=OSError,
    NVML_CLOCK_SM=1,
    NVML_CLOCK_MEM=2,
    NVML_TEMPERATURE_GPU=3,
    nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x24,
    nvmlDeviceGetClockInfo=lambda handle, which: 1000 * which + handle,
    nvmlDeviceGetTemperature=lambda handle, which: 40 * which + handle,
    nvmlDeviceGetPowerUsage=lambda handle: 654_321 + handle,
    nvmlDeviceGetTotalEnergyConsumption=lambda handle: 77 + handle,
)


def _clocks(nvml: Any = NVML) -> Clocks:
    made = object.__new__(Clocks)
    made.absent, made._last, made._nvml, made._handle = "", None, nvml, 7
    return made


class Fake:
    """A contestant whose samples are drawn."""

    def __init__(self, name: str, us: float, calls: int) -> None:
        self.name, self.us, self.calls, self.replays = name, us, calls, 0
        self._drawn = random.Random(name)

    def sample(self) -> float:
        return self.us * self._drawn.uniform(0.9, 1.1)

    def samples(self, count: int) -> list[float]:
        return [self.sample() for _ in range(count)]

    def replay(self) -> None:
        self.replays += 1


class FakeTimer:
    """A graph takes what its calls take, and 5 µs."""

    launch_us = 5.0

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def capture(self, calls: Any) -> Any:
        self.log.append(len(calls))
        return lambda: (setattr(self, "now", self.now + 5.0), [call() for call in calls])

    def elapsed_us(self, work: Any) -> float:
        before = self.now
        work()
        return self.now - before

    def queue(self, work: Any) -> Any:
        took = self.elapsed_us(work)
        return lambda: took

    def side_stream(self) -> Any:
        return mock.MagicMock()

    def synchronize(self) -> None:
        self.log.append("wait")


def _contestant(us: float) -> list[Any]:
    made, seen = FakeTimer(), []
    watch = SimpleNamespace(before=lambda: seen.append("before"), after=lambda: seen.append("after"))
    one = contestant.Contestant(
        "one", lambda: setattr(made, "now", made.now + us), made, watch, lambda: seen.append("flush")
    )
    one.probe()
    probed = one.us
    one.capture(3)
    return [probed, one.calls, one.samples(2), one.sample(), seen, made.log]


def _first_call(us: float) -> list[Any]:
    """The estimate, the calls, and the mean of four more, of calls that take µs, then less and less."""
    made, seen = object.__new__(timer.Clock), []
    end = SimpleNamespace(record=lambda: seen.append("end"), synchronize=lambda: seen.append("wait"))
    start = SimpleNamespace(record=lambda: seen.append("start"), elapsed_time=lambda end: us / 1e3 / len(seen))
    made._events = [start, end]
    first = made.first(lambda: seen.append("call"))
    return [first, made.a_call(timer.Repeated(lambda: seen.append("work"), 4)), seen]


def _energy(us: float, steps: Any, seconds: float) -> list[Any]:
    readings, times = itertools.chain(steps, itertools.repeat(steps[-1])), itertools.count(0.0, seconds)
    one, waits = Fake("one", us, 2), []
    found = contest.energy_per_call(one, lambda: next(readings), lambda: waits.append(1), lambda: next(times))
    return [found, one.replays, len(waits)]


def _finals() -> Iterator[Any]:
    for name, cache, count in itertools.product(
        ("FINAL", "ORDER", "COMPARISON", "SCREEN"), ("warm", "cold"), (None, 7)
    ):
        those = [Fake("a", 10.0, 3), Fake("b", 11.0, 3), Fake("far", 250.0, 1)]
        turns: list[str] = []
        found = benchmark.measure(those, PROTOCOLS[name], cache, _clocks(), count, watch=turns.append)
        yield [{n: [t.samples_us, _shown(t.protocol)] for n, t in found.items()}, turns]
    alone = benchmark.screen(Fake("a", 10.0, 3), protocol.SCREEN, "warm", _clocks())
    yield [alone.samples_us, _shown(alone.protocol), benchmark.measure([], protocol.FINAL, "warm", _clocks())]


def _left_behind() -> Iterator[Any]:
    """Who goes on, of finalists and of peers."""
    many = {"1": 5.0, "2": 11.0, "3": 10.0}, {"flash": 2.0, "math": 60.0, "cudnn": 5.5}
    for (own, peers), proves, behind in itertools.product(
        (many, ({}, many[1]), (many[0], {}), ({}, {})), (True, False), (2.0, math.inf)
    ):
        rules = replace(protocol.FINAL, behind=behind, proves=proves)
        held = contest.Contest(None, GPUS["h100"], None, None, rules, None, None)
        held._runs = dict.fromkeys(own, held)
        held._contestants = {name: SimpleNamespace(us=us) for name, us in (own | peers).items()}
        held._leave_behind()
        yield [[*held._contestants], [*held._runs], held._out]


def _shown(words: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in words.items() if name != "run"}


def _ranked() -> Iterator[Any]:
    yield [ranking.interval_ranks(rounds, sure) for rounds in range(40) for sure in (0.5, 0.9, 0.95, 0.99)]
    drawn = random.Random(1)
    timings = {
        n: Timing(
            tuple(drawn.gauss(10 + n / 20, 0.05) for _ in range(25 if n < 5 else 4)), {"stage": "final", "run": "r"}
        )
        for n in range(6)
    }
    timings[9] = Timing((1.0,) * 25, {"stage": "final", "run": "other"})
    yield [{n: [r, r.tie] for n, r in ranking.against_leader(timings, leader).items()} for leader in (0, 3, 5)]
    yield [ranking.compare(timings[n], timings[0], sure) for n in timings for sure in (0.95, 0.99)]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    yield "protocols", {name: asdict(one) for name, one in PROTOCOLS.items()}
    counts = itertools.product((0.5, 3.0, 40.0, 900.0, 3e4), (0.0, 2.0, 15.0), PROTOCOLS.values(), ("warm", "cold"))
    yield "calls", [contestant.calls_for(*words) for words in counts]
    screened = itertools.product((3.0, 40.0, 900.0), (None, 2.0, 35.0, 2e3), (0.0, 15.0), ("warm", "cold"))
    yield "calls to screen", [contestant.calls_to_screen(*words) for words in screened]
    yield "contestants", [_contestant(us) for us in (0.0, 0.3, 2.0, 30.0, 700.0, 2e4)]
    yield "finals", [*_finals()]
    yield "left behind", [*_left_behind()]
    yield "ranks", [*_ranked()]
    steps = ([5] * 3 + [6, 6, 9, 12], [None], [5, 5, 5], [1, 2, 3, 4, 50, 60, 60])
    said = {
        "never": Timing((), {}),
        "wrong": Timing((1.0,), {"disqualified": "It is wrong."}),
        "right": Timing((2.0, 3.0), {}),
    }
    yield "right", FinalResult(said, {}).right_us
    yield "energy", [_energy(us, some, s) for us in (10.0, 3e4) for some in steps for s in (0.01, 0.04, 0.3)]
    read = _clocks()
    yield "clocks", [read.read(), read.record(), read.energy_mj(), read.absent, THROTTLE_REASONS]
    deaf = _clocks(SimpleNamespace(NVMLError=OSError))
    yield "deaf", [deaf.energy_mj(), deaf.read(), deaf.absent, deaf.record(), deaf.energy_mj()]
    yield "first calls", [_first_call(us) for us in (100.0, 2999.0, 3000.0, 3001.0, 5e4, 50_001.0, 1e6)]
    for first_us in (1.0, 2.0, 6.5, 40.0, 299.0, 300.0, 900.0, 1e4):
        made, called = FakeTimer(), []
        repeated = timer.repeat(lambda called=called: called.append(1), first_us, made)
        before = len(called)
        repeated.work()
        yield f"repeated {first_us}", [repeated.calls, before, len(called), repeated.kept is None]
    problems = [AttentionProblem(1, 16, 16, n, n, 64) for n in (64, 4096)]
    hurried = [
        timed_run.why_implausible(Timing((us,), {}), p, GPUS["h100"]) for p in problems for us in (0.1, 9.0, 900.0)
    ]
    yield "implausible", hurried
    yield "why", [str(contestant.ContestantFailed("one", RuntimeError("It fell."))), protocol.ENERGY]


def test_what_is_timed_and_how_often_stays():
    assert not changed("finals")


@pytest.mark.parametrize("given, asked", [("GPU-ab", "GPU-ab"), ("cd", "GPU-cd")])
def test_a_device_is_found_by_its_uuid_or_absent(monkeypatch, given, asked):
    library = mock.MagicMock(NVMLError=OSError)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = Clocks(given)
    assert not found.absent and found._handle is library.nvmlDeviceGetHandleByUUID.return_value
    assert library.mock_calls[:2] == [mock.call.nvmlInit(), mock.call.nvmlDeviceGetHandleByUUID(asked)]
    assert library.nvmlDeviceGetTemperature.called, "it is read at once"
    library.nvmlInit.side_effect = OSError("no driver")
    assert Clocks(given).absent == "NVML: no driver." and Clocks(given).read() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Clocks(given).absent == "nvidia-ml-py is not installed."


def test_the_launch_of_a_graph_is_timed_behind_work_that_keeps_the_device_busy(monkeypatch):
    made, lead = object.__new__(timer.Timer), mock.MagicMock()
    monkeypatch.setattr(timer.torch, "empty", empty := mock.Mock(return_value=lead))
    replay, stream, elapsed = mock.Mock(), mock.MagicMock(), mock.Mock(side_effect=itertools.count(9.0, 0.5))
    for name, fake in (("capture", lambda calls: replay), ("side_stream", lambda: stream), ("elapsed_us", elapsed)):
        monkeypatch.setattr(made, name, fake, raising=False)
    assert made.launch_us == 9.0 and empty.call_args.kwargs["dtype"].itemsize == 1
    assert lead.zero_.call_count == elapsed.call_count == timer.LAUNCHES and replay.called


def test_the_device_is_idle_before_a_side_stream_and_after_it(monkeypatch):
    monkeypatch.setattr(timer.torch, "cuda", cuda := mock.MagicMock())
    with object.__new__(timer.Timer).side_stream():
        assert [name for name, *_ in cuda.mock_calls[:2]] == ["synchronize", "Stream"]
    assert cuda.mock_calls[-1] == mock.call.Stream().synchronize()
