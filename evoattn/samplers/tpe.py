"""Optuna's tree-structured Parzen estimator, one for each family."""

import random
from bisect import insort
from operator import itemgetter
from typing import ClassVar, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from evoattn.model import records as records
from evoattn.model.records import Proposal, Trial
from evoattn.model.space import SearchSpace, config_id
from evoattn.samplers.base import Params, ProposingSampler, SamplerSetup, objective
from evoattn.samplers.optuna_study import new_study


class History(NamedTuple):
    """How many finished trials an estimator is fitted to."""

    longest: int = 256
    """The time of a fit grows with them, to 2-4 ms here."""
    best: int = 64
    latest: int = 64
    """What stays when the history is full: the best of all times and the latest."""


STARTUP = 16
"""Right kernels of a family before its estimator is asked."""
EXPLORING_SHARE = 0.15
"""Proposals whose family is chosen at random, not by success."""
LEADERS = 16
"""The best trials of all families: a family is chosen as often as it is among them."""


class _Estimator:
    """Optuna's TPE over one family. It sees the index of each value, so that all kinds of values are alike to it.

    Candidates under evaluation are `RUNNING` in Optuna, whose constant liar keeps new draws away from them.
    Failures are `PRUNED`, which TPE counts as worse than any value. `FAIL` is what it leaves out."""

    def __init__(self, space: SearchSpace, rng: random.Random, history: History) -> None:
        self.successes = 0
        self._rng, self._history = rng, history
        self._fixed = {p.name: p.values[0] for p in space.parameters if len(p.values) == 1}
        self._values = {p.name: p.values for p in space.parameters if len(p.values) > 1}
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(range(len(values))) for name, values in self._values.items()
        }
        self._finished: list[tuple[float | None, Params]] = []
        self._running: dict[str, Params] = {}
        self._numbers: dict[str, int] = {}
        self._made: optuna.Study | None = None

    @property
    def _study(self) -> optuna.Study:
        """The Optuna study of what is remembered and what is running; made anew where part of the history was
        forgotten."""
        if self._made is None:
            self._made = new_study(
                TPESampler(n_startup_trials=0, multivariate=True, constant_liar=True, seed=self._rng.getrandbits(32))
            )
            for value, params in self._finished:
                self._made.add_trial(
                    self._frozen(params, TrialState.PRUNED if value is None else TrialState.COMPLETE, value)
                )
            for identity, params in self._running.items():
                self._numbers[identity] = self._add_running(params)
        return self._made

    def _frozen(self, params: Params, state: TrialState, value: float | None = None) -> FrozenTrial:
        indices = {name: values.index(params[name]) for name, values in self._values.items()}
        return create_trial(params=indices, distributions=self._distributions, state=state, value=value)

    def _add_running(self, params: Params) -> int:
        self._study.add_trial(self._frozen(params, TrialState.RUNNING))
        return len(self._study.get_trials(deepcopy=False)) - 1

    def draw(self) -> Params:
        """What the estimator thinks best next. It is under evaluation only from `start` on, as it may be invalid."""
        trial = self._study.ask(self._distributions)
        self._study.tell(trial, state=TrialState.FAIL)
        return self._fixed | {name: values[trial.params[name]] for name, values in self._values.items()}

    def start(self, identity: str, params: Params) -> None:
        """A config is under evaluation."""
        self._numbers[identity] = self._add_running(params)
        self._running[identity] = params

    def finish(self, identity: str, value: float | None) -> None:
        """Its value, or None if it failed."""
        self._study.tell(
            self._numbers.pop(identity), value, TrialState.PRUNED if value is None else TrialState.COMPLETE
        )
        self._remember(self._running.pop(identity), value)

    def drop(self, identity: str) -> None:
        """There is nothing to learn from it."""
        self._study.tell(self._numbers.pop(identity), state=TrialState.FAIL)
        del self._running[identity]

    def add(self, params: Params, value: float | None) -> None:
        """A trial recorded earlier, before any was started."""
        self._made = None
        self._remember(params, value)

    def _remember(self, params: Params, value: float | None) -> None:
        self.successes += value is not None
        self._finished.append((value, params))
        if len(self._finished) > self._history.longest:
            kept = self._history.latest
            latest = self._finished[-kept:]
            earlier = [(value, params) for value, params in self._finished[:-kept] if value is not None]
            self._finished = [*sorted(earlier, key=itemgetter(0))[: self._history.best], *latest]
            self._made = None


class TpeSampler(ProposingSampler):
    """TPE (Bergstra et al. 2011), multivariate, over the parameters of one family at a time.

    The family is chosen first, by its share among the best trials. One estimator for all would have to leave out
    every parameter that not all families have."""

    history: ClassVar = History()

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__(setup)
        self._estimators = {family: _Estimator(space, self.rng, self.history) for family, space in setup.spaces.items()}
        self._leaders: list[tuple[float, str]] = []

    def _next(self) -> Proposal | None:
        if proposal := super()._next():
            self._estimators[proposal.family].start(config_id(proposal.family, proposal.params), proposal.params)
        return proposal

    def _propose(self) -> Proposal | None:
        if not self._leaders or self.rng.random() < EXPLORING_SHARE:
            family = self.rng.choice(list(self.pool.spaces))
        else:
            family = self.rng.choice(self._leaders)[1]
        estimator = self._estimators[family]
        if estimator.successes < STARTUP:
            return self._random(family)
        params = self.pool.claim(family, estimator.draw())
        return Proposal(family, params, operator="tpe") if params else None

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        if trial.state is records.TrialState.DUPLICATE:
            self._estimators[trial.family].drop(trial.config_id)
            return
        value = objective(trial)
        self._estimators[trial.family].finish(trial.config_id, value)
        self._lead(trial.family, value)

    def _learn(self, trial: Trial) -> None:
        if trial.state is not records.TrialState.DUPLICATE:
            value = objective(trial)
            self._estimators[trial.family].add(trial.config, value)
            self._lead(trial.family, value)

    def _lead(self, family: str, value: float | None) -> None:
        if value is not None:
            insort(self._leaders, (value, family))
            del self._leaders[LEADERS:]
