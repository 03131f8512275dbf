"""A final on the device: finalists and peers interleaved over the same memory. Who fails is out with a sentence, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from evoattn.backends.base import LaunchError
from evoattn.correctness.arena import Arena
from evoattn.correctness.validate import run_case
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import Timing
from evoattn.timing import benchmark
from evoattn.timing.benchmark import Contestant, ContestantFailed, Protocol, Witness
from evoattn.timing.clocks import Clocks
from evoattn.timing.peers import table as baselines
from evoattn.timing.peers.table import PEERS, PeerRefused
from evoattn.timing.timed_run import TimedRun, TimingSetup, why_implausible

Finalists = dict[str, BuiltKernel]
"""By name."""
NO_MEMORY = "It needs more device memory than is free."
_HARMLESS = (LaunchError, PeerRefused, torch.cuda.OutOfMemoryError)
"""What may leave the process as it was. Anything else may not, a failed capture above all: torch's allocator then still takes itself
to be capturing (`CUDAGraph::capture_end`, whose comment speaks of "all kinds of weird states")."""


class FinalResult(NamedTuple):
    """What came of a final, or of one try at it."""

    timings: dict[str, Timing]
    """By finalist and peer. A finalist that failed has a timing without samples (`Timing.out`); `disqualified` in a timing's protocol is the
    sentence by which a finalist proved wrong. A peer's protocol carries its package and `version`."""
    refusals: dict[str, str]
    """By peer: why it has no timing."""
    complete: bool = True
    """False: the process is lost to who is in here, and the others want another try in a fresh one."""


class _DeviceLost(RuntimeError):
    """Nothing more can be measured in this process."""


class Contest:
    """One try at a final. `alive` says whether the device answers and all inputs are as they were; `report` is told whose turn it is, so
    that a process that dies or hangs is laid at the right door."""

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
        self._contestants: dict[str, Contestant] = {}
        self._runs: dict[str, TimedRun] = {}
        self._faults: dict[str, str] = {}
        self._out: dict[str, Timing] = {}
        self._refusals: dict[str, str] = {}

    def hold(self, finalists: Finalists, peers: Iterable[str]) -> FinalResult:
        """Enter, measure and prove all of them. Raises nothing for what a contestant does."""
        try:
            for name, kernel in finalists.items():
                with self._turn(name):
                    self._enter(name, kernel)
            for name in peers:
                self._arena.restore()  # a finalist that changes its inputs must not make a peer's answer wrong
                with self._turn(name):
                    self._enter_peer(name)
            timings = self._measure()
            for name in list(self._runs):
                with self._turn(name):
                    self._prove(name, timings[name])
        except _DeviceLost:
            return FinalResult(self._out, self._refusals, complete=False)
        for name in timings.keys() & PEERS.keys():
            timings[name].protocol["version"] = PEERS[name].version(self._setup.own.problem)
        return FinalResult(timings | self._out, self._refusals)

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """What is raised inside puts `name` out. Raises `_DeviceLost` where nobody can go on in this process after it."""
        self._report(name)
        try:
            yield
        except Exception as error:
            if name not in PEERS and not isinstance(error, RuntimeError):
                raise  # a bug of ours, no doing of the kernel's; a peer's code may raise anything
            no_memory = isinstance(error, torch.cuda.OutOfMemoryError)
            sentence = NO_MEMORY if no_memory else " ".join(f"{error}".split())[:300] or type(error).__name__
            if name not in PEERS:
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
        result, outputs = run_case(self._setup.backend, kernel, self._setup.own, repeat=True)
        run = TimedRun(self._setup, kernel, outputs, self._arena)
        self._contestants[name] = run.contestant(name, self._protocol)
        self._runs[name], self._faults[name] = run, result.reason

    def _enter_peer(self, name: str) -> None:
        setup = self._setup
        call = baselines.peer_call(name, setup.own.problem, self._arena.views, setup.own.answer)
        self._contestants[name] = Contestant(
            name, call, self._protocol, setup.cache, setup.timer, Witness(self._arena, None), setup.flush
        )

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
                    raise failed.__cause__
                del self._contestants[failed.name]
                self._runs.pop(failed.name, None)

    def _prove(self, name: str, timing: Timing) -> None:
        fault = self._faults[name] or self._runs[name].check_work(self._contestants[name]).reason
        if fault := fault or why_implausible(timing, self._setup.own.problem, self._gpu):
            timing.protocol["disqualified"] = f"In the final: {fault}"
