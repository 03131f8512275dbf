"""The zoo through the product: a search whose sampler proposes one honest config, and whose sources each have a fault planted in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from zoo import CONTROL_AFTER, GENES, HONEST, LIARS, PROBLEM, Liar, lie

from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, Proposal, Study, Trial, TrialState
from evoattn.model.space import KernelConfig, load_space
from evoattn.search import finals
from evoattn.search import loop as search
from evoattn.search.budget import Budget
from evoattn.storage import Storage

LOOP_SECONDS = 10.0
"""Given to a kernel on the device: an evaluation takes a twentieth of it, and one that loops for ever all of it."""


class Script:
    """A sampler that proposes the same honest config for each liar; the last one is a second control, another config."""

    rejected: Counter[str] = Counter()

    def __init__(self, liars: tuple[Liar, ...]) -> None:
        self._left = [
            Proposal("flash_scalar", GENES | (CONTROL_AFTER if n == len(liars) - 1 else {}), operator=str(n))
            for n in range(len(liars))
        ]

    def ask(self, n: int) -> list[Proposal]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        pass

    def restore(self, trials: Iterator[Trial]) -> None:
        pass


@dataclass(frozen=True)
class Caught:
    """What became of one liar: its trial, and whether that is what it should be."""

    liar: Liar
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


@contextmanager
def _liars_for_candidates(liars: tuple[Liar, ...]) -> Iterator[None]:
    order = iter(liars)

    def render_again(trial: Trial, config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> Candidate:
        return lie(render(registry.lookup(trial.family), problem, config, gpu), liars[int(trial.operator)])

    with (
        mock.patch.object(search, "render", lambda *words: lie(render(*words), next(order))),
        mock.patch.object(finals, "render_again", render_again),
        mock.patch.object(search, "DEVICE_SECONDS", LOOP_SECONDS),
    ):
        yield


def run_zoo(
    storage: Storage, gpu: GpuSpec, offline: bool, jobs: int, sanitize: bool = False
) -> tuple[Study, list[Caught]]:
    """Every liar between two honest controls, searched on the device or offline. Raises what `Search.run` raises."""
    liars = (HONEST, *LIARS, HONEST)
    study = storage.create_study("zoo", PROBLEM, gpu, offline, "random", 0, ("flash_scalar",), {}, {})
    running = search.Search(
        storage,
        study,
        PROBLEM,
        gpu,
        {"flash_scalar": load_space("flash_scalar", gpu)},
        Script(liars),
        jobs,
        sanitize=sanitize,
    )
    with _liars_for_candidates(liars):
        running.run(Budget(trials=len(liars)))
    leaders = {trial.number for trial in storage.leaderboard(study, 100)}
    caught = []
    for trial in sorted(storage.iter_trials(study, evidence=True), key=lambda t: int(t.operator)):
        liar = liars[int(trial.operator)]
        caught.append(
            Caught(liar, trial, trial.number in leaders, _as_expected(liar, trial, offline, trial.number in leaders))
        )
    return study, caught


def _as_expected(liar: Liar, trial: Trial, offline: bool, leads: bool) -> bool:
    states, words = (liar.offline_states, liar.offline_words) if offline else (liar.states, liar.words)
    if liar is HONEST:
        return leads and trial.state in states
    if trial.disqualified:
        return not leads
    return not leads and trial.state in states and any(w in trial.reason for w in words)
