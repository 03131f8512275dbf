"""A careful comparison: kernels and peers timed in turns, in shuffled order, over several rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from statistics import median

import torch

from evoattn.backends.base import LaunchError
from evoattn.correctness.cases import Case, make_case
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.peers.table import PEERS, Peer, peer_call
from evoattn.portfolio.engine.clock import GRAPH_UNDER_US, Call
from evoattn.portfolio.engine.memory import Memory
from evoattn.timing.contestant import Contestant, calls_for_all
from evoattn.timing.protocol import Protocol
from evoattn.timing.timer import Timer

FAR_BEHIND = 2.5
"""A call that takes this many times the least so far, and the next one too, is its time."""
BEHIND = 1.5
"""A kernel whose probe takes this many times the least has no rounds: what it takes exactly decides nothing."""
REPLAYS = Protocol("final", 5, 700.0, most_calls=500)
"""How long a replay is; rounds are as many as are asked for."""


class Final:
    """The contestants on one problem."""

    def __init__(
        self, memory: Memory, timer: Timer, problem: AttentionProblem, table: Mapping[str, Peer] = PEERS
    ) -> None:
        self._memory, self._timer, self._problem, self._table = memory, timer, problem, table
        self.samples: dict[str, list[float]] = {}
        """µs of each round of `run`: of kernels by their index, of peers by name."""

    def run(
        self, kernels: list[BuiltKernel], peers: tuple[str, ...], rounds: int, seed: int
    ) -> tuple[list[float | None], dict[str, float], dict[str, str]]:
        """Median µs of each kernel (None where it fails; by its probe where it is far behind), of each peer whose
        answer is right, on inputs that `seed` makes, and why peers are missing.

        All have the same tensors: where K and V lie decides some per cent of a time that is bound by memory. All have
        one number of calls per replay, found by replay (`evoattn.timing.contestant`).
        """
        case = make_case("the problem's own shape", self._problem, seed, self._memory.device) if peers else None
        firsts, probed = self._kernels(kernels, case.tensors if case else None)
        least = min((c.us for c in probed.values()), default=0.0)
        firsts = [probed[i].us if i in probed else us for i, us in enumerate(firsts)]
        ours = {i: c for i, c in probed.items() if c.us <= BEHIND * least}
        theirs, refusals = self._peers(peers, case) if case else ({}, {})
        contestants = [*ours.values(), *theirs.values()]
        if contestants:
            calls = calls_for_all(contestants, self._timer.launch_us, REPLAYS, "warm")
            for contestant in contestants:
                contestant.capture(calls)
        samples = self.samples = {c.name: [] for c in contestants}
        shuffle = random.Random(seed)
        for _ in range(rounds):
            shuffle.shuffle(contestants)
            for contestant in contestants:
                samples[contestant.name].append(contestant.sample())
        times = [median(samples[ours[i].name]) if i in ours else first for i, first in enumerate(firsts)]
        return times, {name: median(samples[name]) for name in theirs}, refusals

    def _kernels(
        self, kernels: list[BuiltKernel], inputs: dict[str, torch.Tensor] | None
    ) -> tuple[list[float | None], dict[int, Contestant]]:
        """µs of each kernel's second or third call (None where it fails), and by its index who takes part in the
        rounds: who fails or is far behind does not."""
        firsts: list[float | None] = []
        entered: dict[int, Contestant] = {}
        for index, kernel in enumerate(kernels):
            known = [us for us in firsts if us]
            try:
                enqueue = self._memory.prepare(kernel, self._problem, inputs)
                contestant = Contestant(str(index), enqueue, self._timer)
                most = max(FAR_BEHIND * min(known), GRAPH_UNDER_US) if known else math.inf
                if contestant.us > most:  # by a call that the CPU was late with, perhaps
                    contestant.us = min(contestant.us, self._timer.elapsed_us(enqueue))
                firsts.append(contestant.us)
                if contestant.us <= most:
                    contestant.probe()
                    entered[index] = contestant
            except (LaunchError, RuntimeError):
                firsts[index:] = [None]
        return firsts, entered

    def _peers(self, names: tuple[str, ...], case: Case) -> tuple[dict[str, Contestant], dict[str, str]]:
        """Each peer that runs and whose answer is right, and why the others do not. Their first calls, which may
        compile, come before any that is timed."""
        entered: dict[str, Contestant] = {}
        refusals: dict[str, str] = {}
        for name in names:
            try:
                call = peer_call(self._table[name], self._problem, case.tensors, case.answer)
                contestant = Contestant(name, _dropping(call), self._timer)
                contestant.probe()
                entered[name] = contestant
            except Exception as error:  # other people's code: it may raise anything
                refusals[name] = " ".join(str(error).split())[:160]
        return entered, refusals


def _dropping(call: Callable[[], torch.Tensor]) -> Call:
    """A peer's call without its answer."""

    def drop() -> None:
        call()

    return drop
