"""Who takes part in the final of a search, and what compute-sanitizer says of them."""

from __future__ import annotations

from collections.abc import Callable

from evoattn import sanitizer
from evoattn.compiler import compile_candidate
from evoattn.config import ConfigError, KernelConfig, SearchSpace
from evoattn.evaluate import Finalists
from evoattn.families import registry
from evoattn.gpu import GpuSpec
from evoattn.problem import AttentionProblem
from evoattn.render import render
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.trial import Candidate, Study, Timing, Trial

FINALISTS = 8


def config_of(trial: Trial, spaces: dict[str, SearchSpace]) -> KernelConfig | None:
    """The trial's config if it is one of today's space: a database may hold those of another version, or anything."""
    try:
        return spaces[trial.family].make_config(trial.config)
    except (KeyError, ConfigError):
        return None


def render_again(trial: Trial, config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> Candidate:
    """What today's template makes of a recorded trial."""
    return render(registry.lookup(trial.family), problem, config, gpu)


def choose(storage: Storage, study: Study, problem: AttentionProblem, gpu: GpuSpec, spaces: dict[str, SearchSpace]) -> Finalists:
    """By the trial's number, the best `FINALISTS` candidates, and the best starting config if it is none of them: so what the search
    gained over it is measured in one run.

    Who is not rendered today as it was recorded is passed over. Raises `StorageError`.
    """
    finalists: Finalists = {}

    def takes_part(trial: Trial) -> bool:
        if str(trial.number) in finalists:
            return True
        if (config := config_of(trial, spaces)) is None:
            return False
        candidate = render_again(trial, config, problem, gpu)
        if candidate.source_hash != trial.source_hash:       # of another version, or of whoever wrote the database: not ours to run
            return False
        finalists[str(trial.number)] = trial.family, config, compile_candidate(candidate)
        return True

    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False):
        takes_part(trial)
    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False, operator=STARTING):
        if takes_part(trial):
            break
    return finalists


def sanitize(problem: AttentionProblem, finalists: Finalists, timings: dict[str, Timing], refresh: Callable[[], None]) -> None:
    """compute-sanitizer's verdicts into the finalists' timings; who reads or writes out of bounds is disqualified."""
    for name, (_, config, kernel) in finalists.items():
        refresh()
        verdicts = sanitizer.sanitize(problem, config, kernel)
        timings[name].protocol["sanitizer"] = verdicts
        if sanitizer.is_damning(verdicts, kernel):
            said = "; ".join(f"{tool} {sentence}" for tool, sentence in verdicts.items())
            timings[name].protocol.setdefault("disqualified", f"By compute-sanitizer: {said}")
