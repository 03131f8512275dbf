"""What a sampler is, and the part of the work that all of them share."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from evoattn.model.records import Proposal, Trial, TrialState, is_positive
from evoattn.model.space import SearchSpace, config_id
from evoattn.samplers.pool import ConfigPool, Params, WhyInvalid

STARTING = "starting"
"""The operator of known-good configs."""


Prior = Callable[[list[tuple[str, Params]]], list[float]]
"""What is expected of each (family, params) before anything is measured: the natural log of its time over that of a
good one."""


@dataclass(frozen=True)
class SamplerSetup:
    """What a sampler is made of.

    `why_invalid(family, params)` says in one sentence why a config cannot be, or None; `prior` is what is expected of
    configs, where that is known."""

    spaces: dict[str, SearchSpace]
    seed: int
    why_invalid: WhyInvalid
    prior: Prior | None = None


class Sampler(Protocol):
    """Proposes configs and learns from what became of them. Results may come in any order, long after the proposal."""

    @property
    def rejected(self) -> Counter[str]:
        """Invalid configs that it drew and dropped, by reason."""
        ...

    def ask(self, n: int) -> list[Proposal]:
        """Up to `n` proposals, none of a config proposed or recorded before; fewer only when nothing valid is left."""
        ...

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        """What became of a proposal of this sampler. Trials that it did not propose go to `restore`."""
        ...

    def restore(self, trials: Iterable[Trial]) -> None:
        """Take in the trials of the study recorded so far; called before the first `ask`."""
        ...


def objective(trial: Trial) -> float | None:
    """What samplers minimise: the log of the median in µs, or of the relative cost (a study has one or the other).

    None for a failure. Unlike `Trial.value` it has a pruned trial's, and one's that a final disqualified."""
    if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and trial.timing:
        cost: float | None = trial.timing.median_us
    elif trial.state is TrialState.ESTIMATED:
        cost = trial.relative_cost
    else:
        return None
    return math.log(cost) if cost is not None and is_positive(cost) else None


class ProposingSampler:
    """Starting configs first, then `_propose`, which every sampler fills with its own way; random configs where that
    gives none."""

    def __init__(self, setup: SamplerSetup) -> None:
        self.rng = random.Random(setup.seed)
        self.pool = ConfigPool(setup.spaces, setup.why_invalid, self.rng)
        self._starting = deque(config for space in setup.spaces.values() for config in space.starting_configs())

    @property
    def rejected(self) -> Counter[str]:
        return self.pool.rejected

    def ask(self, n: int) -> list[Proposal]:
        proposals: list[Proposal] = []
        while len(proposals) < n and (proposal := self._next()):
            proposals.append(proposal)
        return proposals

    def _next(self) -> Proposal | None:
        while self._starting:
            config = self._starting.popleft()
            # One that does not fit becomes a near one that does.
            if params := self.pool.claim(config.family, config.params):
                return Proposal(config.family, params, operator=STARTING)
        return self._propose() or self._random()

    def _random(self, family: str | None = None) -> Proposal | None:
        drawn = self.pool.draw(family)
        return Proposal(*drawn, operator="random") if drawn else None

    def _propose(self) -> Proposal | None:
        """A claimed config, or None to leave it to chance."""
        return None

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        """Nothing to learn here."""

    def restore(self, trials: Iterable[Trial]) -> None:
        """Mark the recorded configs as seen, learn from those of today's spaces, and go on with fresh random
        numbers."""
        count = 0
        for trial in trials:
            count += 1
            self.pool.mark(trial.config_id)
            if trial.operator == STARTING and self._starting:  # proposed in order, recorded as it is or mended
                self._starting.popleft()
            params = self.pool.known(trial.family, trial.config)
            if params is not None:
                identity = config_id(trial.family, params)  # another than the recorded one where a gene is younger
                self.pool.mark(identity)
                self._learn(replace(trial, config=params, config_id=identity))
        self.rng.seed(f"{self.rng.random()} after {count} trials")

    def _learn(self, trial: Trial) -> None:
        """Take in a trial recorded earlier."""
