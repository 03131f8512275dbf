"""Which recorded trial a user means: by its number, or the best of a study, or of all studies of a problem."""

from __future__ import annotations

from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Trial
from evoattn.storage.errors import UnknownRecord
from evoattn.storage.storage import Storage

BEST = "best"
"""The word for a leader, in place of a trial's number."""


def is_alike(study: Study, problem: AttentionProblem, gpu: GpuSpec | None, offline: bool | None = None) -> bool:
    """Whether `study` is of the problem, whatever its name, and of the GPU and the kind, where these are given."""
    return (
        AttentionProblem(**study.problem).with_() == problem.with_()
        and (gpu is None or study.gpu == gpu.name)
        and (offline is None or study.offline == offline)
    )


def chosen_trial(
    storage: Storage,
    text: str,
    study: str | None = None,
    problem: AttentionProblem | None = None,
    gpu: GpuSpec | None = None,
) -> Trial:
    """The trial with the number `text`, or for `best` a leader: that of all studies of `problem` (see `best_trial`), of
    the study called `study`, or of the latest study.

    Raises `UnknownRecord` where there is none, and `WrongUse` for a GPU without a problem.
    """
    if gpu and not problem:
        raise WrongUse(f"The GPU {gpu.name} chooses among the studies of one problem: give a shape or a problem too.")
    if text != BEST:
        return storage.trial(trial_number(text))
    if problem:
        return best_trial(storage, problem, gpu)
    chosen = storage.chosen_study(study)
    if leaders := storage.leaderboard(chosen, 1):
        return leaders[0]
    raise UnknownRecord(f"There is no best trial yet: study {chosen.name} has none that is right.")


def trial_number(text: str) -> int:
    """The number that a word of the command line is. Raises `UnknownRecord`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise UnknownRecord(
            f"{text!r} is not the number of a trial; give `best`, or a number that `evoattn report --full` shows."
        )
    return int(text)


def best_trial(storage: Storage, problem: AttentionProblem, gpu: GpuSpec | None) -> Trial:
    """The best trial over all studies of the problem on one GPU: the least median of the measured ones, else the least
    relative cost of the estimated ones.

    Raises `UnknownRecord` where there is none, and where several GPUs have one and `gpu` is None.
    """
    alike = [study for study in storage.studies() if is_alike(study, problem, gpu)]
    found = [(study, leaders[0]) for study in alike if (leaders := storage.leaderboard(study, 1))]
    if not found:
        where = f" on {gpu.name}" if gpu else ""
        raise UnknownRecord(
            f"No right trial of {problem.with_().describe()}{where} is recorded; `evoattn studies` lists what is."
        )
    if len(gpus := sorted({study.gpu for study, _ in found})) > 1:
        raise UnknownRecord(f"Several GPUs have trials of this problem; choose one: --gpu {' or --gpu '.join(gpus)}.")
    measured = [trial for study, trial in found if not study.offline and trial.timing]
    if measured:
        return min(measured, key=lambda trial: trial.timing.median_us if trial.timing else 0.0)
    return min((trial for _, trial in found), key=lambda trial: trial.relative_cost or 0.0)
