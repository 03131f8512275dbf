"""Several samplers in one, with shares that shift to those that find."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from evoattn.model.records import Proposal, Trial
from evoattn.model.space import SearchSpace, config_id
from evoattn.samplers.base import ProposingSampler, SamplerSetup, objective
from evoattn.samplers.genetic import GeneticSampler
from evoattn.samplers.guided import GuidedSampler
from evoattn.samplers.local import LocalSampler

WINDOW = 100
"""Latest results that count."""
EXPLORATION = 0.2
"""Weight of what is unknown of an arm; OpenTuner uses 0.05 with windows of 500."""
GOOD_SHARE = 0.1
"""A result among this share of the best so far is a find."""


@dataclass
class _Arm:
    sampler: ProposingSampler
    finds: deque[tuple[int, bool]] = field(default_factory=deque)
    """(number of the result, whether it was a find)."""
    asked: int = 0


class MixedSampler(ProposingSampler):
    """A multi-armed bandit over the guided sampler, the genetic algorithm and local search, by the area under the curve
    of finds (OpenTuner; Ansel et al. 2014): recent finds count most, and what was seldom asked gets its chance.

    All arms draw on one pool and learn from every result.
    """

    arms: tuple[Callable[[SamplerSetup], ProposingSampler], ...] = (GuidedSampler, GeneticSampler, LocalSampler)

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__(setup)
        bare = {name: SearchSpace(name, space.parameters, ()) for name, space in setup.spaces.items()}
        shared = replace(setup, spaces=bare, make_pool=lambda spaces, why_invalid, rng: self.pool)
        self._arms = [_Arm(make(replace(shared, seed=setup.seed + i))) for i, make in enumerate(self.arms)]
        self._asked: dict[str, _Arm] = {}
        """Who proposed what is under evaluation, by config id."""
        self._values: list[float] = []
        self._results = 0

    def _propose(self) -> Proposal | None:
        for arm in sorted(self._arms, key=self._promise, reverse=True):
            if proposals := arm.sampler.ask(1):
                arm.asked += 1
                self._asked[config_id(proposals[0].family, proposals[0].params)] = arm
                return proposals[0]
        return None

    def _promise(self, arm: _Arm) -> float:
        if not arm.asked:
            return math.inf
        n = len(arm.finds)
        area = sum(i * found for i, (_, found) in enumerate(arm.finds, 1)) / (n * (n + 1) / 2) if n else 0.0
        total = sum(a.asked for a in self._arms)
        return area + EXPLORATION * math.sqrt(2 * math.log(total) / arm.asked)

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        asked = self._asked.pop(trial.config_id, None)
        value = objective(trial)
        if value is not None:
            insort(self._values, value)
        found = value is not None and value <= self._values[int(GOOD_SHARE * len(self._values))]
        self._results += 1
        for arm in self._arms:
            if arm is asked:
                arm.finds.append((self._results, found))
                arm.sampler.tell(proposal, trial)
            else:
                arm.sampler.watch(trial)
            while arm.finds and arm.finds[0][0] <= self._results - WINDOW:
                arm.finds.popleft()

    def _learn(self, trial: Trial) -> None:
        if (value := objective(trial)) is not None:
            insort(self._values, value)
        for arm in self._arms:
            arm.sampler.watch(trial)
