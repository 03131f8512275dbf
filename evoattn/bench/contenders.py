"""Which configs stand for a problem: recorded ones, those of a file, or the families' starting configs."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from evoattn.bench.row import Note
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import Candidate, Study, Trial
from evoattn.model.space import ConfigError, KernelConfig
from evoattn.search.starting import starting_configs
from evoattn.storage import Storage
from evoattn.storage.storage import is_alike

MAX_FILE_BYTES = 16 << 20


class Recorded(NamedTuple):
    """A trial and where it is kept."""

    storage: Storage
    study: Study
    trial: Trial

    @property
    def median_us(self) -> float:
        """Infinite where the trial has no time."""
        return self.trial.timing.median_us if self.trial.timing else math.inf


@dataclass(frozen=True)
class Contender:
    """A candidate of today's templates, and the trial that it repeats if its recorded source is the same."""

    config: KernelConfig
    candidate: Candidate
    recorded: Recorded | None = None


def recorded_best(storages: list[Storage], problem: AttentionProblem, arch: str, top: int) -> list[Recorded]:
    """The best `top` measured trials of any study of `problem` on `arch`, best first, one per config."""
    found: list[Recorded] = []
    for storage in storages:
        for study in storage.studies():
            if study.arch == arch and is_alike(study, problem, None, offline=False):
                found += [Recorded(storage, study, trial) for trial in storage.leaderboard(study, top)]
    best: dict[str, Recorded] = {}
    for entry in sorted(found, key=lambda e: e.median_us):
        best.setdefault(entry.trial.config_id, entry)
    return list(best.values())[:top]


def _contender(problem: AttentionProblem, gpu: GpuSpec, family: str, params: dict[str, Any]) -> Contender:
    """Raises `ConfigError` or `FamilyError` for what today's search spaces do not hold. A pick may have genes that do
    nothing on the problem."""
    kind = registry.lookup(family)
    config = load_space(family, gpu).make_config(params)
    if reason := kind.why_unsupported(problem, gpu) or kind.why_impossible(problem, config, gpu):
        raise ConfigError(f"{family}: {reason}")
    return Contender(config, render(kind, problem, config, gpu))


def choose(
    problem: AttentionProblem,
    gpu: GpuSpec,
    storages: list[Storage],
    configs: list[tuple[str, dict[str, Any]]],
    top: int,
) -> tuple[list[Contender], list[Note]]:
    """(contenders, notes on what could not stand): the best recorded ones and `configs` [(family, parameters)], else
    the starting configs."""
    chosen: dict[str, Contender] = {}
    notes = []
    for recorded in recorded_best(storages, problem, gpu.arch, top):
        trial = recorded.trial
        try:
            contender = _contender(problem, gpu, trial.family, trial.config)
        except (ConfigError, registry.FamilyError) as error:
            notes.append(Note(f"trial {trial.number} of study {recorded.study.name}", f"passed over: {error}"))
            continue
        if contender.candidate.source_hash == trial.source_hash:
            contender = replace(contender, recorded=recorded)
        chosen[contender.config.id] = contender
    for family, params in configs:
        try:
            contender = _contender(problem, gpu, family, params)
            chosen.setdefault(contender.config.id, contender)
        except (ConfigError, registry.FamilyError) as error:
            notes.append(Note("a config of the file", f"passed over: {error}"))
    return list(chosen.values()) or _starting(problem, gpu), notes


def _starting(problem: AttentionProblem, gpu: GpuSpec) -> list[Contender]:
    contenders = []
    for name, family in registry.FAMILIES.items():
        if family.why_unsupported(problem, gpu) is None:
            for config in starting_configs(load_space(name, gpu), problem, gpu):
                contenders.append(Contender(config, render(family, problem, config, gpu)))
    return contenders


def write_configs(storages: list[Storage], top: int) -> str:
    """The best `top` configs of every problem and architecture measured in the databases, as JSON lines for
    `read_configs`."""
    problems = {}
    for storage in storages:
        for study in storage.studies():
            if not study.offline:
                problem = AttentionProblem(**study.problem)
                problems[problem.with_(), study.arch] = problem
    lines = []
    for (_, arch), problem in problems.items():
        for recorded in recorded_best(storages, problem, arch, top):
            trial = recorded.trial
            best = {"median_us": recorded.median_us, "family": trial.family, "config": trial.config}
            row = {"problem": problem.to_dict(), "arch": arch} | best
            lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def read_configs(path: Path, problem: AttentionProblem, arch: str) -> list[tuple[str, dict[str, Any]]]:
    """(family, parameters) of each line for `problem` on `arch`, in the file's order. What they hold is checked by
    `choose`.

    Raises `ConfigError` where the file is not of the form that `write_configs` gives, or larger than 16 MiB; `OSError`
    where it cannot be read."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: it is no file of configs.")
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            family, params, theirs = row["family"], row["config"], AttentionProblem(**row["problem"])
            scalars = isinstance(params, dict) and all(
                isinstance(value, (int, float, str)) for value in params.values()
            )
            if not (isinstance(family, str) and scalars):
                raise TypeError("a family and its parameters are wanted")
        except (ValueError, TypeError, KeyError, RecursionError, ProblemError) as error:
            raise ConfigError(
                f"Line {number} of {path} is not a config as scripts/best_configs.py writes them: {error}."
            ) from None
        if row.get("arch") == arch and theirs.with_() == problem.with_():
            found.append((family, params))
    return found
