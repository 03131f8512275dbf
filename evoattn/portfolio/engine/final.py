"""A careful comparison: kernels and peers timed in turns, in shuffled order, over several rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import torch

from evoattn.backends.base import LaunchError
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.engine.clock import GRAPH_UNDER_US, Call, Clock, Repeated, repeat
from evoattn.portfolio.engine.memory import Memory
from evoattn.timing.peers.table import PEERS

FAR_BEHIND = 2.5
"""A first call that takes this many times the least so far is its time."""


class Final:
    """The contestants on one problem."""

    def __init__(self, memory: Memory, clock: Clock, problem: AttentionProblem) -> None:
        self._memory, self._clock, self._problem = memory, clock, problem

    def run(
        self, kernels: list[BuiltKernel], peers: tuple[str, ...], rounds: int, seed: int
    ) -> tuple[list[float | None], dict[str, float], dict[str, str]]:
        """Median µs of each kernel (None where it fails), of each peer, and why peers are missing."""
        firsts, works = self._warmed(kernels)
        calls, refusals = self._peers(peers)
        contestants: list[tuple[object, Repeated]] = [(i, work) for i, work in enumerate(works) if work]
        contestants += list(calls.items())
        samples: dict[object, list[float]] = {name: [] for name, _ in contestants}
        shuffle = random.Random(seed)
        for _ in range(rounds):
            shuffle.shuffle(contestants)
            for name, work in contestants:
                samples[name].append(self._clock.a_call(work))
        ours = [median(samples[i]) if samples.get(i) else first for i, first in enumerate(firsts)]
        return ours, {name: median(samples[name]) for name in calls}, refusals

    def _warmed(self, kernels: list[BuiltKernel]) -> tuple[list[float | None], list[Repeated | None]]:
        """µs of each kernel's second call, and its work in the rounds: None where it fails or is far behind."""
        firsts: list[float | None] = []
        works: list[Repeated | None] = []
        for kernel in kernels:
            try:
                enqueue = self._memory.prepare(kernel, self._problem)
                first = self._clock.first(enqueue)
                known = [us for us in firsts if us]
                far_behind = bool(known) and first > max(FAR_BEHIND * min(known), GRAPH_UNDER_US)
                works.append(None if far_behind else repeat(enqueue, first))
                firsts.append(first)
            except (LaunchError, RuntimeError):
                works.append(None)
                firsts.append(None)
        return firsts, works

    def _peers(self, names: tuple[str, ...]) -> tuple[dict[str, Repeated], dict[str, str]]:
        """The work of each peer that runs, and why the others do not."""
        tensors = self._memory.tensors(self._problem)
        calls: dict[str, Repeated] = {}
        refusals: dict[str, str] = {}
        for name in names:
            try:
                call = _dropping(PEERS[name].make(self._problem, tensors))
                calls[name] = repeat(call, self._clock.first(call))
            except Exception as error:  # other people's code: it may raise anything
                refusals[name] = " ".join(str(error).split())[:160]
        return calls, refusals


def _dropping(call: Callable[[], torch.Tensor]) -> Call:
    """A peer's call without its answer."""

    def drop() -> None:
        call()

    return drop
