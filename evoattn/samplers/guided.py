"""Guided by a model of what was measured: many configs are thought of, the model chooses which to try."""

import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Iterable
from importlib import import_module

import numpy as np

from evoattn.model.records import Proposal, Trial, TrialState
from evoattn.model.space import config_id
from evoattn.samplers.base import ProposingSampler, SamplerSetup, objective
from evoattn.samplers.learners import Array, Judge, regression
from evoattn.samplers.pool import Params
from evoattn.samplers.thoughts import Thinker, Thought, first_of_each_value

STARTUP = 16
"""Right kernels before a model is fitted where there is no prior."""
STARTUP_WITH_PRIOR = 4
"""And where there is one: until then it chooses alone."""
BATCH, FIRST_BATCH = 16, 6
"""Results between two fits, at most and at least: a sixth of what is known, as a fit with the thoughts that it judges
takes 30 to 100 ms."""
PRIOR_ERROR = 0.1
"""Of the log of a time: noise of this deviation keeps the first choices, by the prior alone, from being all alike."""
PRIOR_OPINIONS = 8
"""Predictions of each config that are made of the prior with such noise, as there are no trees yet."""
STARTING = 10
"""Starting configs that are proposed where there is a prior: those that it likes best. The others are thought of."""
ELITE = 12
"""The best so far, of which configs are bred."""
FIRST_THOUGHTS, FIRST_ROUNDS = 480, 2
"""Configs thought of before the first proposal, of all families."""
FAMILY_THOUGHTS, FAMILY_ROUNDS, FAMILY_FAR = 60, 16, 0.8
"""Then so many of each family in so many rounds, while the prior thinks its best at most so much slower (log) than the
best of all. It takes 0.1 to 0.5 s, while the GPU worker starts."""
EACH_FAMILY, FAMILY_NEAR = 2, 0.4
"""Of each family so many configs are tried first: those that the prior likes best, at most so much slower by it (log)
than the best of all. Where families are close, it errs by up to 0.25 between them (landscapes.npz)."""
THOUGHTS, MOST_EACH, LEAST_EACH = 480, 60, 4
"""Configs thought of for all proposals that are asked for at once, and the most and the least for each of them. The
more the better (reports/samplers.md), but several GPUs ask for more proposals at once, and not more often."""
TOGETHER = 8
"""Proposals whose thoughts are thought together, as the model judges many as fast as few."""
RANDOM_SHARE, LIKED_SHARE = 0.15, 0.4
"""Of the thoughts: at random, and bred of those that the model likes best; the others are bred of the best so far."""
MOST_THOUGHTS = 400
"""That are kept from one fit to the next."""
EXPLORING_SHARE = 0.05
"""Proposals at random."""
MOST_TRIALS = 800
"""Trials that the model is fitted to: half of them the best, half the latest."""


class GuidedSampler(ProposingSampler):
    """The model learns by how much the prior errs on this problem. Each proposal is the best in the opinion (the
    predicted times) of one of its trees, so that what the trees disagree on is tried (Thompson sampling).

    Without a prior, the first configs are random. Failures teach the model what to keep away from."""

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__(setup)
        self._importing: threading.Thread | None = None
        self._with_each, self._together, self._provided = MOST_EACH, 1, 0
        """Thoughts with each proposal; for how many of them at once, and for how many already."""
        self._startup = STARTUP_WITH_PRIOR if setup.prior else STARTUP
        self._has_prior = setup.prior is not None
        self._thinker = Thinker(self.pool, setup.prior)
        self._values: dict[str, float | None] = {}
        """By config id in the order learned: the log of the time, None for a failure."""
        self._thoughts: dict[str, Thought] = {}
        """Of `_values`."""
        self._best: list[tuple[float, str]] = []
        self._judge: Judge | None = None
        self._open: dict[str, Thought] = {}
        """What may be proposed, by config id."""
        self._opinions: dict[str, Array] = {}
        """Of `_open`: what the model makes of each."""
        self._sent: set[str] = set()
        """Proposed, without a result."""
        self._news = 0
        """Results since the last fit."""
        self._first: deque[str] = deque()
        """Config ids that are proposed before others."""
        self._spare: list[tuple[str, Params]] = []
        """Starting configs that are not proposed as such."""
        if setup.prior and self._starting:
            configs = [(c.family, c.params) for c in self._starting]
            order = np.argsort(setup.prior(configs), kind="stable")
            self._spare = [configs[i] for i in order[STARTING:]]
            self._starting = deque(self._starting[i] for i in order[:STARTING])

    def ask(self, n: int) -> list[Proposal]:
        self._with_each = max(LEAST_EACH, min(MOST_EACH, THOUGHTS // max(1, n)))
        self._together = max(1, min(TOGETHER, n))
        return super().ask(n)

    def _next(self) -> Proposal | None:
        if self._importing is None:  # it takes a second, while the first candidates are compiled elsewhere
            self._importing = threading.Thread(target=import_module, args=("sklearn.ensemble",), daemon=True)
            self._importing.start()
        return super()._next()

    def _propose(self) -> Proposal | None:
        if (not self._has_prior and len(self._best) < self._startup) or self.rng.random() < EXPLORING_SHARE:
            return None
        if self._judge is None or self._news >= min(BATCH, max(FIRST_BATCH, len(self._values) // 6)):
            self._refit()
        if not self._open:
            for _ in range(FIRST_ROUNDS):
                self._think(FIRST_THOUGHTS // FIRST_ROUNDS)
            if self._has_prior and not self._values:
                self._think_of_families()
        if not self._provided:
            self._think(self._with_each * self._together)
            self._provided = self._together
        self._provided -= 1
        while self._open:
            identity = self._choose()
            thought = self._open.pop(identity)
            del self._opinions[identity]
            if self.pool.mark(identity):
                self._sent.add(identity)
                return Proposal(thought.family, thought.params, operator="guided")
        return None

    def _choose(self) -> str:
        """One of the first, or else the best of the open thoughts in one opinion."""
        while self._first:
            if (first := self._first.popleft()) in self._open:
                return first
        names, opinions = list(self._opinions), np.array(list(self._opinions.values()))
        return names[int(opinions[:, self.rng.randrange(opinions.shape[1])].argmin())]

    def _think(self, count: int) -> None:
        """Think of about `count` more configs."""
        random, of_liked = math.ceil(RANDOM_SHARE * count), int(LIKED_SHARE * count)
        liked = self._liked(2 * ELITE)
        best = [self._thoughts[identity] for _, identity in self._best[:ELITE]] or liked
        configs = self._thinker.random(random if best else count) + self._thinker.bred(best, count - random - of_liked)
        configs += self._thinker.bred(liked, of_liked) + ([] if self._open else self._spare)
        self._add(self._thinker.near(configs))

    def _think_of_families(self) -> None:
        """Think of more configs of each family, and choose those to be tried first.

        Every other round breeds of one config for each value of each gene: bred of the best alone, the configs of a
        family soon are all alike."""
        for n in range(FAMILY_ROUNDS):
            for own in self._by_family(FAMILY_FAR):
                parents = own[:ELITE] if n % 2 else first_of_each_value(own)
                self._add(self._thinker.near(self._thinker.bred(parents, FAMILY_THOUGHTS)))
        near = self._by_family(FAMILY_NEAR)
        chosen = [own[i] for i in range(EACH_FAMILY) for own in near if i < len(own)]
        self._first.extend(config_id(thought.family, thought.params) for thought in chosen)

    def _by_family(self, near: float) -> list[list[Thought]]:
        """The open thoughts of each family whose best is at most `near` above the best of all by the prior, best
        first."""
        families: dict[str, list[Thought]] = {}
        for thought in sorted(self._open.values(), key=lambda thought: thought.prior):
            families.setdefault(thought.family, []).append(thought)
        least = min((own[0].prior for own in families.values()), default=0.0)
        return [own for own in families.values() if own[0].prior <= least + near]

    def _liked(self, count: int) -> list[Thought]:
        """The open thoughts that some opinion likes best."""
        if not self._open:
            return []
        names = list(self._opinions)
        order = np.array(list(self._opinions.values())).min(1).argsort()[:count]
        return [self._open[names[i]] for i in order]

    def _add(self, thoughts: dict[str, Thought]) -> None:
        fresh = {identity: thought for identity, thought in thoughts.items() if identity not in self._open}
        if fresh and self._judge:
            rows, prior = _features(fresh.values())
            self._open |= fresh
            self._opinions |= dict(zip(fresh, self._judge(rows, prior).T, strict=True))

    def _refit(self) -> None:
        """A model of all that is known, and what it makes of the open thoughts, of which the worst are dropped."""
        self._news, self._judge = 0, self._fit()
        thoughts, self._open, self._opinions = self._open, {}, {}
        self._add(thoughts)
        liked = self._liked(MOST_THOUGHTS)
        kept = {config_id(t.family, t.params) for t in liked}
        self._open = {identity: t for identity, t in self._open.items() if identity in kept}
        self._opinions = {identity: o for identity, o in self._opinions.items() if identity in kept}
        self._thinker.forget([*self._values, *kept, *self._sent])

    def _fit(self) -> Judge:
        if len(self._best) < self._startup:
            noise = np.random.default_rng(self.rng.getrandbits(31))
            return lambda rows, prior: prior + noise.normal(0.0, PRIOR_ERROR, (PRIOR_OPINIONS, len(prior)))
        known = list(self._values)
        if len(known) > MOST_TRIALS:
            best = [identity for _, identity in self._best[: MOST_TRIALS // 2]]
            known = list(dict.fromkeys([*best, *known[-MOST_TRIALS // 2 :]]))
        rows, prior = _features(self._thoughts[identity] for identity in known)
        return regression(rows, prior, [self._values[i] for i in known], self.rng.getrandbits(31))

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        self._learn(trial)

    def _learn(self, trial: Trial) -> None:
        self._sent.discard(trial.config_id)
        if trial.state is TrialState.DUPLICATE:
            return
        value = objective(trial)
        self._news += 1
        self._values[trial.config_id] = value
        self._thoughts |= self._thinker.of([(trial.family, trial.config)])
        if value is not None:
            insort(self._best, (value, trial.config_id))


def _features(thoughts: Iterable[Thought]) -> tuple[Array, Array]:
    """Rows of features, and the prior of each."""
    given = list(thoughts)
    return np.array([t.row for t in given]), np.array([t.prior for t in given])
