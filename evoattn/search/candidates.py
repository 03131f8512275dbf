"""Candidates between the sampler and the database: those on their way, those compiled, and the table of all seen."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace

from evoattn.evaluation.tasks import Compiled
from evoattn.families.base import Family
from evoattn.model.launch import KernelLaunch
from evoattn.model.records import Candidate, CompiledKernel, Proposal
from evoattn.model.space import KernelConfig

Identity = tuple[str, tuple[KernelLaunch, ...]]
"""What tells one behaviour from another: the source's hash, and how it is launched."""


@dataclass(frozen=True)
class Pending:
    """A candidate on its way."""

    proposal: Proposal
    family: Family
    config: KernelConfig
    candidate: Candidate
    identity: Identity
    kernel: CompiledKernel | None = None
    """Once it is compiled."""
    relative_cost: float | None = None
    again: bool = False
    """It is evaluated a second time, in a fresh process, as the first one may have been harmed
    (`Evaluation.doubtful`)."""


class Ready:
    """Compiled candidates that wait for the device, the most promising first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Pending]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, pending: Pending, compiled: Compiled) -> None:
        """A candidate that the cost model cannot judge goes before those that it can; equal ones go in the order in
        which they came."""
        cost = compiled.relative_cost
        ready = replace(pending, kernel=compiled.kernel, relative_cost=cost)
        heapq.heappush(self._heap, (0.0 if cost is None else cost, next(self._order), ready))

    def add_again(self, pending: Pending) -> None:
        """Before all others: a second evaluation."""
        heapq.heappush(self._heap, (-math.inf, next(self._order), replace(pending, again=True)))

    def take(self) -> Pending:
        """The most promising. Raises `IndexError` if none waits."""
        return heapq.heappop(self._heap)[2]


class Seen:
    """All behaviours that were recorded or are on their way."""

    def __init__(self) -> None:
        self._numbers: dict[Identity, int | None] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def earlier(self, identity: Identity) -> str | None:
        """Who behaves like this already, in words; None if nobody does, and then it is noted as on its way."""
        if identity not in self._numbers:
            self._numbers[identity] = None
            return None
        number = self._numbers[identity]
        return f"trial {number}" if number else "a candidate still on its way"

    def recorded(self, identity: Identity, number: int) -> None:
        """It has a trial now."""
        self._numbers[identity] = number
