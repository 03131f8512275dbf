"""A final on the device: finalists and peers interleaved over the same memory. One that fails is out; the others go
on."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil

import torch

from evoattn.backends.base import LaunchError
from evoattn.correctness.arena import Arena
from evoattn.correctness.validate import run_case
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import Timing
from evoattn.model.timeline import mark
from evoattn.peers.table import Peer, PeerRefused, peer_call
from evoattn.timing import benchmark
from evoattn.timing.clocks import Clocks
from evoattn.timing.contestant import Contestant, ContestantFailed, ReplayWatch, calls_for_all
from evoattn.timing.protocol import ENERGY, Finalists, FinalResult, Protocol
from evoattn.timing.timed_run import TimedRun, TimingSetup, why_implausible

SECONDS = 0.25
"""Of replays. NVML's counter moves some ten to fifty times per second."""
BETWEEN_READINGS_US = 4000.0
"""Replays of this length are queued between two readings of the counter, each of which takes the CPU some µs."""
STUCK_SECONDS = 1.0
"""A counter that does not move for so long does not count."""


def energy_per_call(
    contestant: Contestant,
    read_mj: Callable[[], int | None],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.monotonic,
) -> float | None:
    """Millijoules of the whole board per call, at the clocks and the power that many calls in a row lead to.

    `read_mj` reads the counter in mJ (`Clocks.energy_mj`), None where there is none. The interval begins and ends where
    the counter moves, so that its steps do not matter. None without a counter, or where it does not move."""
    first, began = read_mj(), now()
    if first is None:
        return None
    replays = max(1, ceil(BETWEEN_READINGS_US / max(contestant.us * contestant.calls, 1.0)))

    def run_and_read() -> int | None:
        for _ in range(replays):
            contestant.replay()
        synchronize()
        return read_mj()

    start = first
    while start == first and now() - began < STUCK_SECONDS:
        start = run_and_read() or first
    if start == first:
        return None
    runs, last, runs_until_last, began = 0, start, 0, now()
    while now() - began < SECONDS or (not runs_until_last and now() - began < STUCK_SECONDS):
        runs += 1
        reading = run_and_read()
        if reading is not None and reading != last:
            last, runs_until_last = reading, runs
    return (last - start) / (runs_until_last * replays * contestant.calls) if runs_until_last else None


NO_MEMORY = "It needs more device memory than is free."
WEIGHED_WITHIN = 2.0
"""Times the fastest: who is slower than that gets no energy, which takes a third of a second."""
_HARMLESS = (LaunchError, PeerRefused, torch.cuda.OutOfMemoryError)
"""Errors that may leave the process as it was. Others may not, above all a failed capture: torch's allocator then still
believes that it is capturing (`CUDAGraph::capture_end`, whose comment speaks of "all kinds of weird states")."""


class _DeviceLost(RuntimeError):
    """Nothing more can be measured in this process."""


class Contest:
    """One try at a final.

    `alive` says whether the device answers and all inputs are as they were. `report` is told whose turn it is, so that
    a crash is attributed to that contestant."""

    def __init__(
        self,
        setup: TimingSetup,
        gpu: GpuSpec,
        clocks: Clocks,
        arena: Arena,
        protocol: Protocol,
        alive: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        self._setup, self._gpu, self._clocks, self._arena, self._protocol = setup, gpu, clocks, arena, protocol
        self._alive, self._report = alive, report
        self._peers: Mapping[str, Peer] = {}
        self._contestants: dict[str, Contestant] = {}
        self._runs: dict[str, TimedRun] = {}
        self._faults: dict[str, str] = {}
        self._out: dict[str, Timing] = {}
        self._refusals: dict[str, str] = {}

    def hold(self, finalists: Finalists, peers: Mapping[str, Peer]) -> FinalResult:
        """Enter, measure and check all of them. Raises nothing for what a contestant does."""
        self._peers = peers
        try:
            for name, kernel in finalists.items():
                with self._turn(name):
                    self._enter(name, kernel)
            for name, peer in peers.items():
                self._arena.restore()  # so that a finalist that changes its inputs makes no peer's answer wrong
                with self._turn(name):
                    self._enter_peer(name, peer)
            mark("final: all have entered")
            self._leave_behind()
            self._capture()
            mark("final: all are captured")
            timings = self._measure()
            mark("final: all are timed")
            for name in timings:
                with self._turn(name):
                    self._weigh(name, timings[name])
            mark("final: all are weighed")
            for name in list(self._runs) if self._protocol.proves else ():
                with self._turn(name):
                    self._prove(name, timings[name])
            mark("final: all are proved")
        except _DeviceLost:
            return FinalResult(self._out, self._refusals, complete=False)
        for name in timings.keys() & peers.keys():
            timings[name].protocol["version"] = peers[name].version(self._setup.own.problem)
        return FinalResult(timings | self._out, self._refusals)

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """An error inside puts `name` out. Raises `_DeviceLost` where nobody can go on in this process after it."""
        self._report(name)
        try:
            yield
        except Exception as error:
            if name not in self._peers and not isinstance(error, RuntimeError):
                raise  # a bug of ours, not the kernel's fault; a peer's code may raise anything
            no_memory = isinstance(error, torch.cuda.OutOfMemoryError)
            sentence = NO_MEMORY if no_memory else " ".join(f"{error}".split())[:300] or type(error).__name__
            if name not in self._peers:
                self._out[name] = Timing.out(sentence, disqualified=not no_memory)
            else:
                self._refusals[name] = (
                    sentence
                    if isinstance(error, PeerRefused) or no_memory
                    else f"It fails when it is timed: {sentence}"
                )
            if not isinstance(error, _HARMLESS) or not self._alive():
                raise _DeviceLost from None

    def _enter(self, name: str, kernel: BuiltKernel) -> None:
        fault, outputs = "", None
        if self._protocol.proves:
            result, outputs = run_case(self._setup.backend, kernel, self._setup.own, repeat=True)
            fault = result.reason
        run = TimedRun(self._setup, kernel, outputs, self._arena)
        self._contestants[name] = run.contestant(name)
        self._contestants[name].probe()
        self._runs[name], self._faults[name] = run, fault

    def _enter_peer(self, name: str, peer: Peer) -> None:
        setup = self._setup
        call = peer_call(peer, setup.own.problem, self._arena.views, setup.own.answer)
        self._contestants[name] = Contestant(name, call, setup.timer, ReplayWatch(self._arena, None), setup.flush)
        self._contestants[name].probe()

    def _leave_behind(self) -> None:
        """Who is far behind has the time of its probe: finalists behind the fastest of them, of whom one that has to be
        proved is out with it, and peers behind the fastest of all."""
        if math.isinf(self._protocol.behind):
            return
        ours = min((self._contestants[name].us for name in self._runs), default=math.inf)
        fastest = min((c.us for c in self._contestants.values()), default=0.0)
        for name, contestant in list(self._contestants.items()):
            least = ours if name in self._runs else fastest
            if contestant.us <= self._protocol.behind * least:
                continue
            del self._contestants[name]
            protocol = {"stage": "probe"}
            if self._runs.pop(name, None) and self._protocol.proves:
                protocol["out"] = f"{least:.2f} µs is the fastest, so that it was not proved."
            self._out[name] = Timing((contestant.us,), protocol)

    def _capture(self) -> None:
        """Graphs of one number of calls for all: with fewer, a contestant would carry more of the graph's launch."""
        if not self._contestants:
            return
        setup = self._setup
        calls = calls_for_all(list(self._contestants.values()), setup.timer.launch_us, self._protocol, setup.cache)
        for name in list(self._contestants):
            try:
                with self._turn(name):
                    self._contestants[name].capture(calls)
            finally:
                if name in self._out or name in self._refusals:
                    del self._contestants[name]
                    self._runs.pop(name, None)

    def _measure(self) -> dict[str, Timing]:
        """The rounds; begun again without whoever fails in them."""
        while True:
            try:
                contestants = list(self._contestants.values())
                return benchmark.measure(
                    contestants, self._protocol, self._setup.cache, self._clocks, watch=self._report
                )
            except ContestantFailed as failed:
                with self._turn(failed.name):
                    raise failed.error from None
                del self._contestants[failed.name]
                self._runs.pop(failed.name, None)

    def _weigh(self, name: str, timing: Timing) -> None:
        """Add a contestant's energy per call, unless it is far behind."""
        contestant = self._contestants[name]
        fastest = min(c.us for c in self._contestants.values())
        if not self._protocol.weighs or contestant.us > WEIGHED_WITHIN * fastest:
            return
        synchronize = self._setup.timer.synchronize
        if energy := energy_per_call(contestant, self._clocks.energy_mj, synchronize):
            timing.protocol[ENERGY] = energy

    def _prove(self, name: str, timing: Timing) -> None:
        fault = self._faults[name] or self._runs[name].check_work(self._contestants[name]).reason
        if fault := fault or why_implausible(timing, self._setup.own.problem, self._gpu):
            timing.protocol["disqualified"] = f"In the final: {fault}"
