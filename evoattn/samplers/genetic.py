"""The genetic algorithm: Optuna's NSGA-II keeps the generations and selects who may breed; children are bred here."""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from optuna.samplers import NSGAIISampler
from optuna.trial import TrialState, create_trial

from evoattn.model.records import Proposal, Trial
from evoattn.model.space import config_id
from evoattn.samplers.base import Params, ProposingSampler, SamplerSetup, objective
from evoattn.samplers.optuna_study import new_study

POPULATION = 24
"""Right kernels per generation: of 12, 16, 24, 32 and 48 this found the best on a made-up problem of two families,
after 400 and after 1500 candidates."""
CROSSOVER_SHARE = 0.8
"""Children of two parents; the others are mutants of one."""
IMMIGRANT_SHARE = 0.1
"""Random configs among the children, so that no family or value dies out for good."""
START_OVER_AFTER = 1000
"""Trials in one Optuna study: its bookkeeping takes 0.2 ms per trial at 1000, and 10 ms at 15 000."""
GENERATION = f"{NSGAIISampler.__name__}:generation"
"""The attribute in which Optuna 5 keeps a trial's generation."""


@dataclass(frozen=True)
class _Individual:
    number: int
    family: str
    params: Params


class GeneticSampler(ProposingSampler):
    """NSGA-II (Deb et al. 2002) with one objective: an elitist genetic algorithm with binary tournaments.

    Optuna's own crossover wants all parents to have the same parameters, so children are made here: of two parents of
    different families the child is of the first one's, and may take the values of parameters that both have. Optuna
    therefore sees no parameters, only who scored what in which generation. A failed candidate never becomes a parent.
    """

    start_over_after: ClassVar = START_OVER_AFTER

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__(setup)
        self._best: list[tuple[float, int, _Individual]] = []
        """The best `POPULATION` of all times: value, trial number, individual."""
        self._running: dict[str, int] = {}
        """Config ids under evaluation, and their numbers in Optuna."""
        self._start_over()

    def _start_over(self) -> None:
        """A new Optuna study. Its generation 0 are the best of all trials, as NSGA-II with one objective would select
        them."""
        self._nsga2 = NSGAIISampler(population_size=POPULATION)
        self._study = new_study(self._nsga2)
        self._individuals: dict[int, _Individual] = {}
        self._generation = 0
        self._parents: list[_Individual] = []
        """Of the generation that is being bred, best first; none in generation 0."""
        for token, (value, _, individual) in enumerate(self._best):
            self._individuals[token] = individual
            self._study.add_trial(create_trial(value=value, system_attrs={GENERATION: 0}))
        for identity in self._running:
            self._running[identity] = self._ask_optuna()

    def _ask_optuna(self) -> int:
        """Enter a trial into the present generation; when that is a new one, its parents are chosen."""
        token = self._study.ask().number
        generation = self._nsga2.get_trial_generation(self._study, self._study.get_trials(deepcopy=False)[token])
        if generation != self._generation:
            self._generation = generation
            chosen = self._nsga2.get_parent_population(self._study, generation)
            self._parents = [self._individuals[t.number] for t in sorted(chosen, key=lambda t: (t.value, t.number))]
        return token

    def _next(self) -> Proposal | None:
        token = self._ask_optuna()
        if proposal := super()._next():
            self._running[config_id(proposal.family, proposal.params)] = token
        else:
            self._study.tell(token, state=TrialState.FAIL)
        return proposal

    def _propose(self) -> Proposal | None:
        if not self._parents or self.rng.random() < IMMIGRANT_SHARE:
            return None
        parents = [self._tournament()]
        if self.rng.random() < CROSSOVER_SHARE:
            parents.append(self._tournament())
        family, numbers = parents[0].family, tuple(dict.fromkeys(p.number for p in parents))
        child = self.pool.claim(family, self._breed(parents))
        return Proposal(family, child, numbers, "crossover" if len(numbers) > 1 else "mutation") if child else None

    def _tournament(self) -> _Individual:
        """The better of two drawn at random; parents stand best first."""
        count = len(self._parents)
        return self._parents[min(self.rng.randrange(count), self.rng.randrange(count))]

    def _breed(self, parents: Sequence[_Individual]) -> Params:
        """Uniform crossover (Syswerda 1989) of the first parent with the last, then mutation of one parameter on
        average."""
        family, child = parents[0].family, dict(parents[0].params)
        for p in self.pool.spaces[family].parameters:
            if self.rng.random() < 0.5 and parents[-1].params.get(p.name) in p.values:
                child[p.name] = parents[-1].params[p.name]
        return self.pool.mutate(family, child)

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        token, value = self._running.pop(trial.config_id), objective(trial)
        if value is None:
            self._study.tell(token, state=TrialState.FAIL)
        else:
            self._study.tell(token, value)
            self._individuals[token] = self._individual(trial)
            self._learn(trial)
        if token >= self.start_over_after:
            self._start_over()

    def restore(self, trials: Iterable[Trial]) -> None:
        super().restore(trials)
        self._start_over()

    def _learn(self, trial: Trial) -> None:
        if (value := objective(trial)) is not None:
            insort(self._best, (value, trial.number, self._individual(trial)))
            del self._best[POPULATION:]

    @staticmethod
    def _individual(trial: Trial) -> _Individual:
        return _Individual(trial.number, trial.family, trial.config)
