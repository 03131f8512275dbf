"""Local search: from the best config so far to its neighbours, one gene away."""

from __future__ import annotations

from bisect import insort

from evoattn.model.records import Proposal, Trial
from evoattn.model.space import config_id
from evoattn.samplers.base import ProposingSampler, SamplerSetup, objective
from evoattn.samplers.pool import Params

STARTUP = 8
"""Right kernels before the first step."""
RANDOM_SHARE = 0.05
REPAIR_STEPS = 3
"""Changes to a neighbour that is invalid: genes that go together change together."""


class LocalSampler(ProposingSampler):
    """First-improvement hill climbing with candidates in flight: the next proposal is an untried neighbour of the best
    config that has one, so that a spent neighbourhood leads on to that of the second best."""

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__(setup)
        self._best: list[tuple[float, str, str, Params]] = []
        self._neighbours: dict[str, list[Params]] = {}
        """Untried, by config id."""

    def _propose(self) -> Proposal | None:
        if len(self._best) < STARTUP or self.rng.random() < RANDOM_SHARE:
            return None
        for _, identity, family, params in self._best:
            if identity not in self._neighbours:
                self._neighbours[identity] = self._around(family, params)
            left = self._neighbours[identity]
            while left:
                if claimed := self.pool.claim(family, left.pop(), REPAIR_STEPS):
                    return Proposal(family, claimed, operator="local")
        return None

    def _around(self, family: str, params: Params) -> list[Params]:
        """Every config with one gene changed, in random order; values next to the present one last, as they are taken
        from the end."""
        near: list[Params] = []
        far: list[Params] = []
        for p in self.pool.spaces[family].parameters:
            place = p.values.index(params[p.name])
            for i, value in enumerate(p.values):
                if i != place:
                    (near if abs(i - place) == 1 else far).append(params | {p.name: value})
        self.rng.shuffle(near)
        self.rng.shuffle(far)
        return far + near

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        self._learn(trial)

    def _learn(self, trial: Trial) -> None:
        if (value := objective(trial)) is not None:
            identity = config_id(trial.family, trial.config)
            insort(self._best, (value, identity, trial.family, trial.config))
