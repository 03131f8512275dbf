"""Every cheat through the product: a search over as many honest configs, each of whose sources has a fault planted in
it."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from evoattn.engine.budget import Budget
from evoattn.engine.tools import Tools
from evoattn.evaluation.handlers import DeviceHandler
from evoattn.evaluation.tasks import DeviceAnswer, DeviceTask, Evaluate
from evoattn.families.base import Family
from evoattn.families.registry import load_space, lookup
from evoattn.families.render import render
from evoattn.fleet.base import LocalFleet
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, Proposal, Study, Trial, TrialState
from evoattn.model.space import KernelConfig, Value
from evoattn.search.request import SearchPlan
from evoattn.search.study import Search
from evoattn.storage import Storage
from tests.cheats.faults import CHEATS, FREE, GENES, HONEST, PROBLEM, Cheat, plant_fault

LOOP_SECONDS = 5.0
"""Given to a kernel on the device: an evaluation takes a tenth of it, and one that loops for ever all of it."""
FAMILY = lookup("flash_scalar")


def configs_of(
    cheats: tuple[Cheat, ...], gpu: GpuSpec, problem: AttentionProblem = PROBLEM
) -> dict[str, tuple[KernelConfig, Cheat]]:
    """By id: a valid config for each cheat. Raises `ValueError` if there are too few."""
    space = load_space(FAMILY.name, gpu)
    free = (dict(zip(FREE, values, strict=True)) for values in itertools.product(*FREE.values()))
    points: Iterator[dict[str, Value]] = ({**GENES, **genes} for genes in free)
    valid = (c for c in map(space.make_config, points) if FAMILY.why_invalid(problem, c, gpu) is None)
    chosen = {config.id: (config, cheat) for config, cheat in zip(valid, cheats, strict=False)}
    if len(chosen) < len(cheats):
        raise ValueError(f"flash_scalar has {len(chosen)} configs for {len(cheats)} cheats.")
    return chosen


class Script:
    """A sampler that proposes given configs in order, and passes on what it is `told`."""

    def __init__(self, configs: Iterable[KernelConfig], told: Callable[[Trial], None]) -> None:
        self._told = told
        self.rejected: Counter[str] = Counter()
        self._left = [Proposal(c.family, c.params, operator=str(n)) for n, c in enumerate(configs)]

    def ask(self, n: int) -> list[Proposal]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        self._told(trial)

    def restore(self, trials: Iterable[Trial]) -> None:
        pass


@dataclass(frozen=True)
class FaultPlanter:
    """A renderer that plants the fault of each config's cheat, by the config's id."""

    cheats: dict[str, Cheat]

    def __call__(self, family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> Candidate:
        return plant_fault(render(family, problem, config, gpu), self.cheats[config.id])


class ProvesEverybody(DeviceHandler):
    """Runs all checks on a slow cheat too, which a search would leave at its time."""

    def __call__(self, task: DeviceTask) -> DeviceAnswer:
        return super().__call__(replace(task, best_us=None) if isinstance(task, Evaluate) else task)


@dataclass(frozen=True)
class Caught:
    """What became of one cheat: its trial, and whether that is what it should be."""

    cheat: Cheat
    trial: Trial
    on_leaderboard: bool
    as_expected: bool

    @property
    def sentence(self) -> str:
        return self.trial.disqualified or self.trial.reason

    @property
    def where(self) -> str:
        if self.trial.disqualified:
            return "the final"
        if self.trial.state in (TrialState.COMPILE_ERROR, TrialState.TIMEOUT, TrialState.WORKER_DIED):
            return "the worker"
        return self.trial.validation.backend if self.trial.validation else "the launch"


def run_cheats(
    storage: Storage,
    gpu: GpuSpec,
    offline: bool,
    jobs: int,
    sanitize: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Study, list[Caught]]:
    """Every cheat between two honest controls, searched on the device or offline. `say` is given a line on each as it
    is recorded, and on each stage of the search as it begins. Raises what `Search.run` raises."""
    problem = PROBLEM.with_(head_dim=32) if offline else PROBLEM  # which the interpreter computes in half of the time
    chosen = configs_of((HONEST, *CHEATS, HONEST), gpu, problem)

    study = storage.create_study("cheats", problem, gpu, offline, "random", 0, (FAMILY.name,), {}, {})
    spaces = {FAMILY.name: load_space(FAMILY.name, gpu)}

    def told(trial: Trial) -> None:
        say(f"{chosen[trial.config_id][1].name}: {trial.state}")

    sampler = Script((config for config, _ in chosen.values()), told)
    tools = Tools(
        render=FaultPlanter({name: cheat for name, (_, cheat) in chosen.items()}),
        make_device=ProvesEverybody,
        device_seconds=LOOP_SECONDS,
    )
    running = Search(
        storage,
        study,
        SearchPlan(problem, gpu, None, spaces),
        sampler,
        LocalFleet(jobs),
        sanitize=sanitize,
        tools=tools,
    )
    stages: list[str] = []

    def watch() -> None:
        if running.progress.stage not in stages:
            stages.append(running.progress.stage)
            say(running.progress.stage)

    running.run(Budget(trials=len(chosen)), watch)
    leaders = {trial.number for trial in storage.leaderboard(study, 100)}
    caught = []
    for trial in sorted(storage.iter_trials(study, evidence=True), key=lambda t: int(t.operator)):
        cheat = chosen[trial.config_id][1]
        caught.append(
            Caught(cheat, trial, trial.number in leaders, _as_expected(cheat, trial, offline, trial.number in leaders))
        )
    return study, caught


def _as_expected(cheat: Cheat, trial: Trial, offline: bool, leads: bool) -> bool:
    states, words = (cheat.offline_states, cheat.offline_words) if offline else (cheat.states, cheat.words)
    if cheat is HONEST:
        return leads and trial.state in states
    if trial.disqualified:
        return not leads
    return not leads and trial.state in states and any(w in trial.reason for w in words)
