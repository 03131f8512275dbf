"""Guided by a model of what was measured: many configs are thought of, the model chooses which to try."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from importlib import import_module
from typing import ClassVar

import numpy as np

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Proposal, Trial, TrialState
from evoattn.model.space import SearchSpace, config_id
from evoattn.samplers.base import NO_AIDS, ProposingSampler, SamplerAids, objective
from evoattn.samplers.learners import Array, Judge, Learner, classification, regression
from evoattn.samplers.pool import Params, WhyInvalid
from evoattn.samplers.thoughts import Thinker, Thought

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
STARTING = 10
"""Starting configs that are proposed where there is a prior: those that it likes best. The others are thought of."""
ELITE = 12
"""The best so far, of which configs are bred."""
RANDOM, BRED, ROUNDS, BRED_AGAIN = 40, 160, 2, 80
"""Configs thought of per fit: at random, of the elite, and in each of some rounds of those that the model likes."""
EXPLORING_SHARE = 0.05
"""Proposals at random."""
MOST_TRIALS = 800
"""Trials that the model is fitted to: half of them the best, half the latest."""


class GuidedSampler(ProposingSampler):
    """The model learns by how much the prior errs on this problem. Each proposal is the best in the opinion of one of
    its trees, so that what the trees disagree on is tried (Thompson sampling).

    Without a prior, the first configs are random. Failures teach the model what to keep away from.
    """

    learner: ClassVar[Learner] = staticmethod(regression)

    def __init__(
        self,
        spaces: dict[str, SearchSpace],
        problem: AttentionProblem,
        seed: int,
        why_invalid: WhyInvalid,
        aids: SamplerAids = NO_AIDS,
    ) -> None:
        super().__init__(spaces, problem, seed, why_invalid, aids)
        self._importing: threading.Thread | None = None
        self._startup = STARTUP_WITH_PRIOR if aids.prior else STARTUP
        self._has_prior = aids.prior is not None
        self._thinker = Thinker(self.pool, aids.prior)
        self._values: dict[str, float | None] = {}
        """By config id in the order learned: the log of the time, None for a failure."""
        self._thoughts: dict[str, Thought] = {}
        """Of `_values`."""
        self._best: list[tuple[float, str]] = []
        self._queue: list[Thought] = []
        """What to propose next, the last one first."""
        self._news = 0
        """Results since the queue was filled."""
        self._spare: list[tuple[str, Params]] = []
        """Starting configs that are not proposed as such."""
        if aids.prior and self._starting:
            configs = [(c.family, c.params) for c in self._starting]
            order = np.argsort(aids.prior(configs), kind="stable")
            self._spare = [configs[i] for i in order[STARTING:]]
            self._starting = deque(self._starting[i] for i in order[:STARTING])

    def _next(self) -> Proposal | None:
        if self._importing is None:  # it takes a second, while the first candidates are compiled elsewhere
            self._importing = threading.Thread(target=import_module, args=("sklearn.ensemble",), daemon=True)
            self._importing.start()
        return super()._next()

    def _propose(self) -> Proposal | None:
        if (not self._has_prior and len(self._best) < self._startup) or self.rng.random() < EXPLORING_SHARE:
            return None
        if not self._queue or self._news >= min(BATCH, max(FIRST_BATCH, len(self._values) // 6)):
            self._think()
        while self._queue:
            thought = self._queue.pop()
            if self.pool.mark(config_id(thought.family, thought.params)):
                return Proposal(thought.family, thought.params, operator="guided")
        return None

    def _think(self) -> None:
        """Fit the model, think of configs, and queue those that it likes."""
        judge, self._news = self._fit(), 0
        found = self._thinker.random(RANDOM) | self._thinker.near(self._spare)
        if self._best:
            found |= self._thinker.bred([self._thoughts[identity] for _, identity in self._best[:ELITE]], BRED)
        if not found:  # little is left
            return
        for _ in range(ROUNDS):
            thoughts = list(found.values())
            order = np.argsort(_opinions(judge, thoughts).min(0))[: 2 * ELITE]
            found |= self._thinker.bred([thoughts[i] for i in order], BRED_AGAIN)
        thoughts = list(found.values())
        opinions = _opinions(judge, thoughts)
        orders = [[int(i) for i in np.argsort(-row)] for row in opinions]
        chosen: dict[int, None] = {}
        while len(chosen) < min(2 * BATCH, len(thoughts)):
            opinion = self.rng.choice(orders)
            while opinion[-1] in chosen:
                opinion.pop()
            chosen[opinion.pop()] = None
        self._queue = [thoughts[i] for i in chosen][::-1]
        self._thinker.forget(self._values)

    def _fit(self) -> Judge:
        if len(self._best) < self._startup:
            noise = np.random.default_rng(self.rng.getrandbits(31))
            return lambda rows, prior: prior + noise.normal(0.0, PRIOR_ERROR, (PRIOR_OPINIONS, len(prior)))
        known = list(self._values)
        if len(known) > MOST_TRIALS:
            best = [identity for _, identity in self._best[: MOST_TRIALS // 2]]
            known = list(dict.fromkeys([*best, *known[-MOST_TRIALS // 2 :]]))
        thoughts = [self._thoughts[identity] for identity in known]
        rows, prior = np.array([t.row for t in thoughts]), np.array([t.prior for t in thoughts])
        return self.learner(rows, prior, [self._values[i] for i in known], self.rng.getrandbits(31))

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        self._learn(trial)

    def _learn(self, trial: Trial) -> None:
        if trial.state is TrialState.DUPLICATE:
            return
        value = objective(trial)
        self._news += 1
        self._values[trial.config_id] = value
        self._thoughts |= self._thinker.of([(trial.family, trial.config)])
        if value is not None:
            insort(self._best, (value, trial.config_id))


class ForestSampler(GuidedSampler):
    """Guided by a classifier of the best tenth."""

    learner: ClassVar[Learner] = staticmethod(classification)


def _opinions(judge: Judge, thoughts: list[Thought]) -> Array:
    """Values to minimise, a row per opinion."""
    return judge(np.array([t.row for t in thoughts]), np.array([t.prior for t in thoughts]))
