"""Guided by a model of what was measured: many configs are thought of, the model chooses which to try."""

import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoattn.model.records import Proposal, Trial, TrialState
from evoattn.model.space import SearchSpace, config_id
from evoattn.samplers.base import ConfigPool, Params, Prior, ProposingSampler, SamplerSetup, objective

Array = NDArray[np.float64]
Judge = Callable[[Array, Array], Array]
"""(rows, prior) → values to minimise, a row for each of one or more opinions."""

TREES = 24
LEAST_IN_LEAF = 2
FEATURES_SHARE = 0.5
"""Of the features, tried at each split."""
FAR = 0.7
"""Log of a time over the best beyond which the trees need not tell configs apart: twice the best."""


def regression(rows: Array, prior: Array, values: Sequence[float | None], seed: int) -> Judge:
    """Extremely randomised trees (Geurts et al. 2006) learn by how much the prior errs; each tree is an opinion.

    Fitted to rows of features, the prior of each (natural log of time over best), and what was found: the log of a
    time, or None for a failure, which counts as a time of twice the best."""
    from sklearn.ensemble import ExtraTreesRegressor

    cap = min(v for v in values if v is not None) + FAR
    targets = np.array([cap if v is None else min(v, cap) for v in values]) - np.minimum(prior, FAR)
    model = ExtraTreesRegressor(TREES, min_samples_leaf=LEAST_IN_LEAF, max_features=FEATURES_SHARE, random_state=seed)
    model.fit(_with(rows, prior), targets)

    def judge(rows: Array, prior: Array) -> Array:
        features = _with(rows, prior)
        return np.array([tree.tree_.predict(features).ravel() for tree in model.estimators_]) + prior

    return judge


def _with(rows: Array, prior: Array) -> NDArray[np.float32]:
    """The prior is a feature too. Trees of scikit-learn compute in float32."""
    return np.column_stack([rows, prior]).astype(np.float32)


REPAIR_STEPS = 12
"""Changes to an invalid config before it is given up: another one is as good."""
CROSSOVER_SHARE = 0.5
Config = tuple[str, Params]


class Thought(NamedTuple):
    """A config that a sampler considers, and may propose. `prior` is the natural logarithm of its time over the best's,
    as the cost model or times of other problems let expect."""

    family: str
    params: Params
    row: Array
    prior: float


class Encoder:
    """Configs of several families as rows of equal length: which family, then every gene by its place among its values,
    -1 where the family has no such gene."""

    def __init__(self, spaces: dict[str, SearchSpace]) -> None:
        self._families = list(spaces)
        names = dict.fromkeys(p.name for s in spaces.values() for p in s.parameters if len(p.values) > 1)
        columns = {name: len(spaces) + i for i, name in enumerate(names)}
        self._width = len(spaces) + len(columns)
        self._places = {
            family: [
                (p.name, columns[p.name], {value: i for i, value in enumerate(p.values)})
                for p in space.parameters
                if p.name in columns
            ]
            for family, space in spaces.items()
        }

    def row(self, family: str, params: Params) -> Array:
        """`[columns]`: 1 for its family and 0 for the others, then each gene's place among its values, -1 where the
        family has no such gene."""
        row = np.full(self._width, -1.0)
        row[: len(self._families)] = 0.0
        row[self._families.index(family)] = 1.0
        for name, column, places in self._places[family]:
            row[column] = places[params[name]]
        return row


class Thinker:
    """Makes thoughts: of given configs, at random, or bred from others. What it made of a config is kept."""

    def __init__(self, pool: ConfigPool, prior: Prior | None) -> None:
        self._pool, self._prior, self._rng = pool, prior, pool.rng
        self._encoder = Encoder(pool.spaces)
        self._made: dict[str, Thought] = {}

    def of(self, configs: Iterable[Config]) -> dict[str, Thought]:
        """The thoughts of configs as they are, by config id."""
        named = {config_id(family, params): (family, params) for family, params in configs}
        fresh = {identity: config for identity, config in named.items() if identity not in self._made}
        priors = self._prior(list(fresh.values())) if self._prior and fresh else [0.0] * len(fresh)
        for (identity, (family, params)), prior in zip(fresh.items(), priors, strict=True):
            self._made[identity] = Thought(family, params, self._encoder.row(family, params), prior)
        return {identity: self._made[identity] for identity in named}

    def near(self, configs: Iterable[Config]) -> dict[str, Thought]:
        """Valid new configs near given ones, or these themselves."""
        valid = ((family, self._pool.near(family, params, REPAIR_STEPS)) for family, params in configs)
        return self.of((family, params) for family, params in valid if params is not None)

    def random(self, count: int) -> list[Config]:
        """Configs of families chosen at random; they may be invalid."""
        drawn = (self._rng.choice(list(self._pool.spaces)) for _ in range(count))
        return [(f, {p.name: self._rng.choice(p.values) for p in self._pool.spaces[f].parameters}) for f in drawn]

    def bred(self, parents: Sequence[Thought], count: int) -> list[Config]:
        """Children of `parents`, which stand best first; they may be invalid. None where there are no parents."""
        return [self._child(parents) for _ in range(count if parents else 0)]

    def _child(self, parents: Sequence[Thought]) -> Config:
        one, other = self._parent(parents), self._parent(parents)
        params = dict(one.params)
        if other.family == one.family and self._rng.random() < CROSSOVER_SHARE:
            params = {name: (other.params if self._rng.random() < 0.5 else params)[name] for name in params}
        return one.family, self._pool.mutate(one.family, params)

    def _parent(self, parents: Sequence[Thought]) -> Thought:
        """The better of two."""
        return parents[min(self._rng.randrange(len(parents)), self._rng.randrange(len(parents)))]

    def forget(self, kept: Iterable[str]) -> None:
        """Drop all thoughts but those of the config ids `kept`."""
        self._made = {identity: self._made[identity] for identity in kept}


def first_of_each_value(thoughts: Iterable[Thought]) -> list[Thought]:
    """For each value of each gene the first of a family's thoughts that has it, each thought once."""
    first: dict[tuple[str, Any], Thought] = {}
    for thought in thoughts:
        for gene in thought.params.items():
            first.setdefault(gene, thought)
    return list({id(thought): thought for thought in first.values()}.values())


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
