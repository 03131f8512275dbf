"""A final that proves nobody, on a CPU: who takes part, over which tensors, and how often each is called."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from evoattn.backends.base import LaunchError
from evoattn.correctness.cases import make_case, unanswered
from evoattn.correctness.validate import make_arena
from evoattn.model.gpu import GPUS
from evoattn.model.records import CheckResult
from evoattn.model.shape_text import parse_shape
from evoattn.peers.table import PEERS, Peer
from evoattn.timing.clocks import Clocks
from evoattn.timing.contest import Contest
from evoattn.timing.protocol import ORDER
from evoattn.timing.timed_run import TimingSetup
from evoattn.timing.timer import Timer
from tests.timing.device_clock import CpuBackend, Kernel, Passed

LARGE = parse_shape("B=1,H=2,S=300,D=64,dtype=fp16,mask=full")


class StopwatchTimer(Timer):
    """Counts what the fakes say that they take."""

    launch_us = 0.0

    def __init__(self):
        pass

    def queue(self, work):
        before = Passed.us
        work()
        took = Passed.us - before
        return lambda: took

    @contextmanager
    def side_stream(self):
        yield

    def capture(self, calls):
        return lambda: [call() for call in calls]

    def synchronize(self):
        pass


def final(kernels, peers=None, protocol=ORDER, told=lambda name: None):
    """The result of kernels by name beside peers. `told`: whose turn it is."""
    case = make_case("own", LARGE, 0, "cpu") if peers else unanswered(LARGE, 0, "cpu")
    arena = make_arena(case, {}, torch.device("cpu"))
    arena.arm()
    setup = TimingSetup(CpuBackend(), StopwatchTimer(), "warm", case, case, None)
    contest = Contest(setup, GPUS["h100"], Clocks(""), arena, protocol, lambda: True, told)
    return contest.hold(kernels, peers or {})


def test_who_fails_is_out_and_the_others_go_on():
    result = final({"near": Kernel(us=400.0), "broken": Kernel()})
    assert result.right_us == {"near": 400.0} and result.timings["near"].samples_us == (400.0,) * 5
    assert "no" in result.timings["broken"].disqualified


def test_what_its_probe_shows_far_behind_has_no_rounds():
    near, behind, turns = Kernel(us=20.0), Kernel(us=32.0), []
    result = final({"near": near, "behind": behind}, told=turns.append)
    assert turns.count("near") == turns.count("behind") + 2 + ORDER.samples  # captured and weighed, and each round
    assert result.right_us == {"near": 20.0, "behind": 32.0} and len(result.timings["behind"].samples_us) == 1
    assert near.calls > 5 * behind.calls


def test_a_peer_far_behind_the_fastest_of_all_has_no_rounds(monkeypatch):
    """A finalist is judged by the fastest finalist, a peer by whoever is fastest."""

    def takes(us):
        def make(problem, tensors):
            def call():
                Passed.us += us
                return answer

            answer = PEERS["math"].make(problem, tensors)()
            return call

        return Peer(make, "torch")

    slow, peers = Kernel(us=200.0), {"fast": takes(20.0), "late": takes(200.0)}
    for protocol, rounds in ((ORDER, 5), (replace(ORDER, behind=float("inf")), 5)):
        result = final({"ours": slow}, peers, protocol)
        found = {name: len(timing.samples_us) for name, timing in result.timings.items()}
        assert found == {"ours": rounds, "fast": rounds, "late": 1 if protocol is ORDER else rounds}


def test_all_are_called_as_often():
    quick, slower = Kernel(us=20.0), Kernel(us=28.0)
    result = final({"quick": quick, "slower": slower})
    assert {t.protocol["calls_per_replay"] for t in result.timings.values()} == {35}


def test_a_peer_takes_part_if_its_answer_is_right():
    def wrong(problem, tensors):
        return lambda: torch.zeros(problem.shape("o"), dtype=torch.float16)

    def absent(problem, tensors):
        raise ImportError("no such module")

    def right(problem, tensors):
        answer = PEERS["math"].make(problem, tensors)()
        return lambda: answer

    table = {"right": Peer(right, "torch"), "wrong": Peer(wrong, "torch"), "absent": Peer(absent, "torch")}
    result = final({"ours": Kernel(us=400.0)}, table)
    assert set(result.timings) == {"ours", "right"}
    assert result.timings["right"].protocol["version"] == table["right"].version(LARGE)
    assert "version" not in result.timings["ours"].protocol
    assert "answer is wrong" in result.refusals["wrong"] and "not installed" in result.refusals["absent"]


def test_kernels_and_peers_have_the_same_tensors():
    """Where K and V lie decides some per cent of a time that is bound by memory."""
    given = []

    def make(problem, tensors):
        given.append(tensors)
        return lambda: torch.zeros(problem.shape("o"), dtype=torch.float16)

    kernel = Kernel(us=400.0)
    final({"ours": kernel}, {"peer": Peer(make, "torch")})
    assert [kernel.buffers[name].data_ptr() for name in "qkv"] == [given[0][name].data_ptr() for name in "qkv"]


class Late(Kernel):
    """Launches so many times, and no more."""

    def __init__(self, us, launches):
        super().__init__(us)
        self.launches_left = launches

    def compiled(self, buffers):
        self.launches_left -= 1
        if self.launches_left < 0:
            raise LaunchError("no more")
        super().compiled(buffers)


@pytest.mark.parametrize("launches", [0, 1, 40, 75, 110, 150, 10**6])
def test_whoever_fails_later_is_out_from_then_on(launches):
    """In its probe, when it is captured, or in a round: the others go on, and have all their rounds."""
    late = Late(20.0, launches)
    result = final({"late": late, "other": Kernel(us=21.0), "third": Kernel(us=25.0)})
    assert {name for name, t in result.timings.items() if len(t.samples_us) == 5} >= {"other", "third"}
    assert result.complete and (late.launches_left >= 0) == (result.timings["late"].samples_us == (20.0,) * 5)
    assert ("no more" in (result.timings["late"].disqualified or "")) == (late.launches_left < 0)


def test_a_finalist_that_is_proved_runs_twice(monkeypatch):
    asked = []

    def run_case(backend, kernel, case, repeat=False):
        asked.append(repeat)
        return CheckResult("own", False, 0.0, 1.0, "Two runs differ."), None

    monkeypatch.setattr("evoattn.timing.contest.run_case", run_case)
    result = final({"ours": Kernel(us=400.0), "behind": Kernel(us=700.0)}, protocol=replace(ORDER, proves=True))
    assert asked == [True, True] and result.timings["ours"].disqualified == "In the final: Two runs differ."
    assert result.timings["behind"].samples_us == (700.0,) and not result.right_us, "its time is known, no more"
