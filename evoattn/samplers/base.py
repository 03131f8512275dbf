"""What a sampler is, and the part of the work that all of them share: the configs that may still be proposed, which
are valid and were not proposed or recorded before."""

import itertools
import math
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from evoattn.model.records import Proposal, Trial, TrialState, is_positive
from evoattn.model.space import ConfigError, Parameter, SearchSpace, config_id

Params = dict[str, Any]
WhyInvalid = Callable[[str, Params], str | None]

REPAIR_STEPS = 100
"""Changes to an invalid or known config before it is given up."""
REPAIR_NOISE = 0.2
"""Share of the changes made to any parameter instead of one at fault, as WalkSAT does to leave dead ends."""
FRUITLESS_DRAWS = 200
"""Random configs in a row that no repair helps: then a small space is gone through point by point, and a large one
counts as used up."""
SMALL_SPACE = 50_000
"""Points, at some 20 µs each to ask whether they are valid."""
NEIGHBOUR_SHARE = 0.7
"""Mutations to the next value up or down; the others are to any."""


class ConfigPool:
    """What is left of some families' spaces. A config that was claimed is never given out again.

    `why_invalid(family, params)` says in one sentence why a config cannot be, or None; it should name the parameters at
    fault. `rejected` counts the invalid configs met on the way by reason, the numbers in it replaced by N."""

    def __init__(self, spaces: dict[str, SearchSpace], why_invalid: WhyInvalid, rng: random.Random) -> None:
        self.spaces, self.rng = spaces, rng
        self.rejected: Counter[str] = Counter()
        self._why_invalid = why_invalid
        self._seen: set[str] = set()
        self._open = list(spaces)
        self._free = {family: [p for p in s.parameters if len(p.values) > 1] for family, s in spaces.items()}
        self._points = {family: self._enumerate(space) for family, space in spaces.items()}

    def mark(self, identity: str) -> bool:
        """Note a config id as proposed; False if it was before."""
        new = identity not in self._seen
        self._seen.add(identity)
        return new

    def known(self, family: str, params: Params) -> Params | None:
        """The config as a point of today's spaces; None if it is none: a recorded one may be of a family left out, or
        of an older YAML file."""
        try:
            return self.spaces[family].make_config(params).params
        except (KeyError, ConfigError):
            return None

    def claim(self, family: str, params: Params, steps: int = REPAIR_STEPS) -> Params | None:
        """The config, or a valid new one near it, which is then the caller's to propose; None if there is none within
        `steps` changes."""
        found = self.near(family, params, steps)
        if found is not None:
            self.mark(config_id(family, found))
        return found

    def near(self, family: str, params: Params, steps: int = REPAIR_STEPS) -> Params | None:
        """What `claim` would give, left for others to claim.

        An invalid config is repaired as WalkSAT does (Selman, Kautz, Cohen 1994): change one of the parameters that the
        reason names, until there is no reason left. Drawing anew instead takes up to 5000 draws a valid one (flash_mma
        at head_dim 256), this some 10 to 800."""
        for _ in range(steps):
            if reason := self._why_invalid(family, params):
                self.rejected[re.sub(r"\d+", "N", reason)] += 1
            elif config_id(family, params) not in self._seen:
                return params
            params = self._changed(family, params, reason or "")
        return None

    def _changed(self, family: str, params: Params, reason: str) -> Params:
        """A copy with one parameter changed: mostly one that the reason names, or any if it names none."""
        named = [p for p in self._free[family] if p.name in reason]
        if not named or self.rng.random() < REPAIR_NOISE:
            named = self._free[family]
        if not named:
            return params
        chosen = self.rng.choice(named)
        return params | {chosen.name: self.rng.choice([v for v in chosen.values if v != params[chosen.name]])}

    def draw(self, family: str | None = None) -> tuple[str, Params] | None:
        """Claim a random config: of `family`, or of a family chosen at random. None when nothing is left of it."""
        while self._open and (family is None or family in self._open):
            chosen = family or self.rng.choice(self._open)
            if params := self._draw_from(chosen):
                return chosen, params
            self._open.remove(chosen)
        return None

    def _draw_from(self, family: str) -> Params | None:
        parameters = self.spaces[family].parameters
        for _ in range(FRUITLESS_DRAWS):
            if claimed := self.claim(family, {p.name: self.rng.choice(p.values) for p in parameters}):
                return claimed
        for params in self._points[family]:
            if self.claim(family, params, steps=1):
                return params
        return None

    def _enumerate(self, space: SearchSpace) -> Iterator[Params]:
        """Every point of a small space, once; none of a large one."""
        if space.size <= SMALL_SPACE:
            names = space.names()
            for values in itertools.product(*(p.values for p in space.parameters)):
                yield dict(zip(names, values))

    def mutate(self, family: str, params: Params) -> Params:
        """A copy with one parameter changed on average, mostly to the next value up or down, as values stand in their
        natural order."""
        parameters = self._free[family]
        return params | {
            p.name: self._mutated(p, params[p.name]) for p in parameters if self.rng.random() < 1 / len(parameters)
        }

    def _mutated(self, parameter: Parameter, value: Any) -> Any:
        values = parameter.values
        if value not in values:  # of a config that was given, not drawn
            return self.rng.choice(values)
        index = values.index(value)
        neighbours = [values[i] for i in (index - 1, index + 1) if 0 <= i < len(values)]
        return self.rng.choice(neighbours if self.rng.random() < NEIGHBOUR_SHARE else values)


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
