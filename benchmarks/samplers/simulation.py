"""A search replayed on a recorded landscape: any sampler, many seeds, no GPU.

Every config that a sampler comes upon is exchanged for the nearest recorded config of its family that was not proposed
before. The sampler is told so: it learns from the recorded config, not from the one that it thought of. Failures are
recorded configs like others.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from evoattn.cost.landscapes import Config, Landscape
from evoattn.model.records import Proposal, Timing, Trial, TrialState
from evoattn.model.space import Parameter, SearchSpace, config_id
from evoattn.samplers.base import MakePool, Sampler
from evoattn.samplers.pool import REPAIR_STEPS, ConfigPool, Params, WhyInvalid

JOBS = 15
"""Compile processes beside the search's own, on 16 cores."""
READY_PER_JOB = 2
"""Compiled candidates that wait for the device, as in `search.loop`."""
DEVICE_SECONDS = 0.028
"""Of a candidate in a search on an H100: check and times."""
UNEQUAL = 0.5
"""Least distance of two unequal values of a gene; the greatest, from the first value to the last, is 1."""
STATES = {"compile": TrialState.COMPILE_ERROR, "launch": TrialState.LAUNCH_ERROR, "wrong": TrialState.WRONG_RESULT}


class _Recorded:
    """The configs of one family as points of the unit cube."""

    def __init__(self, space: SearchSpace, configs: list[Config]) -> None:
        self.configs = configs
        self._index = {p.name: {value: i for i, value in enumerate(p.values)} for p in space.parameters}
        self._steps = np.array([1 / max(1, len(p.values) - 1) for p in space.parameters])
        self._points = np.array([self._point(c.params) for c in configs])
        self.open = np.ones(len(configs), bool)

    def _point(self, params: Params) -> list[int]:
        return [index[params[name]] for name, index in self._index.items()]

    def nearest(self, params: Params) -> int | None:
        """The number of the nearest open config, the earlier recorded one of equals; None when none is open."""
        if not self.open.any():
            return None
        apart = np.abs(self._points - self._point(params))
        distance = np.where(apart > 0, UNEQUAL + (1 - UNEQUAL) * apart * self._steps, 0.0).sum(1)
        return int(np.where(self.open, distance, np.inf).argmin())


class RecordedPool(ConfigPool):
    """A pool that gives out recorded configs only: the nearest to what was asked for."""

    def __init__(self, landscape: Landscape, spaces: dict[str, SearchSpace], rng: random.Random) -> None:
        super().__init__(spaces, lambda family, params: None, rng)
        self._recorded = {
            family: _Recorded(
                space,
                [
                    c
                    for c in landscape.configs
                    if (c.family == family and c.state != "right") or (c.family == family and c.best_us is not None)
                ],
            )
            for family, space in spaces.items()
        }
        self._place = {
            config_id(family, c.params): (recorded, i)
            for family, recorded in self._recorded.items()
            for i, c in enumerate(recorded.configs)
        }

    def config(self, family: str, params: Params) -> Config:
        """What was recorded of a config."""
        recorded, i = self._place[config_id(family, params)]
        return recorded.configs[i]

    def mark(self, identity: str) -> bool:
        """See `ConfigPool`; a marked config is no longer the nearest one to any other."""
        if identity in self._place:
            recorded, i = self._place[identity]
            recorded.open[i] = False
        return super().mark(identity)

    def near(self, family: str, params: Params, steps: int = REPAIR_STEPS) -> Params | None:
        """The nearest recorded config that is still open, instead of a repaired one; None if there is none."""
        recorded = self._recorded[family]
        found = recorded.nearest(params) if recorded.configs else None
        return None if found is None else dict(recorded.configs[found].params)

    def _draw_from(self, family: str) -> Params | None:
        return self.claim(family, {p.name: self.rng.choice(p.values) for p in self.spaces[family].parameters})


class Known(Protocol):
    """Who knows what becomes of a config."""

    def config(self, family: str, params: Params) -> Config:
        """What is recorded of it, or stands for that."""
        ...


def spaces_of(landscape: Landscape) -> dict[str, SearchSpace]:
    """The spaces as they were recorded, of families with a config, without starting configs."""
    recorded = {c.family for c in landscape.configs}
    return {
        family: SearchSpace(family, tuple(Parameter(name, values, "") for name, values in genes.items()), ())
        for family, genes in landscape.genes.items()
        if family in recorded
    }


@dataclass(frozen=True)
class Step:
    """One result of a replay, in the order in which they came."""

    config: Config
    operator: str
    seconds: float
    """From the first ask, by the recorded compile times, `jobs` compile processes and one device."""
    best_us: float
    """Least time so far; infinite while there is none."""


def replay(
    landscape: Landscape,
    make: Callable[[MakePool], Sampler],
    count: int,
    jobs: int = JOBS,
) -> list[Step]:
    """The first `count` results of a search, or those until the landscape's best. `make` is called once, with the pool
    to use.

    As many candidates are on their way at once as in a search, so that a sampler hears of a result late.
    """
    pools: list[RecordedPool] = []

    def make_pool(spaces: dict[str, SearchSpace], why_invalid: WhyInvalid, rng: random.Random) -> ConfigPool:
        pools.append(RecordedPool(landscape, spaces, rng))
        return pools[0]

    sampler = make(make_pool)
    steps: list[Step] = []
    for step in itertools.islice(Line(sampler, pools[0], jobs, DEVICE_SECONDS), count):
        steps.append(step)
        if step.best_us <= landscape.best < float("inf"):
            break
    return steps


class Line:
    """The results of a search one after another, without end: compile processes, a queue, and the device."""

    def __init__(self, sampler: Sampler, known: Known, jobs: int, device_seconds: float) -> None:
        """`known` knows what becomes of each config that `sampler` proposes."""
        self._sampler, self._known, self._jobs, self._device_seconds = sampler, known, jobs, device_seconds
        self._now, self._best = 0.0, float("inf")
        self._number = itertools.count(1)
        self._compiling: list[tuple[float, int, Proposal]] = []
        self._ready: deque[Proposal] = deque()
        self._on_device: tuple[float, Proposal] | None = None

    def __iter__(self) -> Line:
        return self

    def __next__(self) -> Step:
        while True:
            self._feed()
            if self._on_device and (not self._compiling or self._on_device[0] <= self._compiling[0][0]):
                self._now, proposal = self._on_device
                self._on_device = None
                return self._told(proposal)
            if not self._compiling:
                raise StopIteration
            self._now, _, proposal = heapq.heappop(self._compiling)
            if self._known.config(proposal.family, proposal.params).state.startswith("compile"):
                return self._told(proposal)
            self._ready.append(proposal)

    def _feed(self) -> None:
        if self._ready and not self._on_device:
            self._on_device = self._now + self._device_seconds, self._ready.popleft()
        room = min(self._jobs - len(self._compiling), READY_PER_JOB * self._jobs - len(self._ready))
        for proposal in self._sampler.ask(room) if room > 0 else ():
            config = self._known.config(proposal.family, proposal.params)
            heapq.heappush(self._compiling, (self._now + config.compile_s, next(self._number), proposal))

    def _told(self, proposal: Proposal) -> Step:
        config = self._known.config(proposal.family, proposal.params)
        us = config.best_us
        state = TrialState.COMPLETE if us else STATES.get(config.state.partition(":")[0], TrialState.TIMEOUT)
        identity = config_id(proposal.family, proposal.params)
        trial = Trial(
            next(self._number), 1, proposal.family, proposal.params, identity, state, config.state, None, None, None,
            (Timing((us,), {"stage": "screen"}),) if us else (), None, proposal.parents, proposal.operator, "", 0.0,
        )  # fmt: skip
        self._sampler.tell(proposal, trial)
        self._best = min(self._best, us or self._best)
        return Step(config, proposal.operator, self._now, self._best)
