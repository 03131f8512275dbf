"""Which recorded trial a user means: by its number, or the best of a study, or of all studies of a problem."""

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
        (gpu is None or study.gpu == gpu.name)
        and (offline is None or study.offline == offline)
        and AttentionProblem(**study.problem).with_() == problem.with_()
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

    Raises `UnknownRecord` where there is none, and `WrongUse` for a GPU without a problem, or where the other words are
    of another trial than the one with that number."""
    if gpu and not problem:
        raise WrongUse(f"The GPU {gpu.name} chooses among the studies of one problem: give a shape or a problem too.")
    if text != BEST:
        trial = storage.trial(trial_number(text))
        _require_of(storage.study(trial.study_id), trial, study, problem, gpu)
        return trial
    if problem:
        return best_trial(storage, problem, gpu)
    chosen = storage.chosen_study(study)
    if leaders := storage.leaderboard(chosen, 1):
        return leaders[0]
    raise UnknownRecord(f"There is no best trial yet: study {chosen.name} has none that is right.")


def _require_of(
    found: Study, trial: Trial, study: str | None, problem: AttentionProblem | None, gpu: GpuSpec | None
) -> None:
    """A number is enough. Raise `WrongUse` where other words beside it are of another trial."""
    words = f"Trial {trial.number} is of study {found.name}"
    if study is not None and study != found.name:
        raise WrongUse(f"{words}, not {study}: leave the study out, or say {BEST}.")
    if problem and not is_alike(found, problem, gpu):
        where = f"{AttentionProblem(**found.problem).with_().describe()} on {found.gpu}"
        raise WrongUse(f"{words}, which is {where}: leave the shape and the GPU out, or say {BEST}.")


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

    Raises `UnknownRecord` where there is none, and where several GPUs have one and `gpu` is None."""
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
