"""The database as the rest of evoattn sees it: records in, records out, sentences for what goes wrong; and which
recorded trial a user means."""

from typing import Any

from sqlalchemy import select

from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import KernelCounters, Profile, Study, Timing, Trial
from evoattn.storage.course import Courses
from evoattn.storage.database import Database, now
from evoattn.storage.errors import UnknownRecord
from evoattn.storage.rows import Row, checked, each, plain_text, timing_from_row
from evoattn.storage.schema import baselines, profiles
from evoattn.storage.studies import Studies
from evoattn.storage.trials import Trials


class Peers(Database):
    """Adding and reading the times and refusals of peers."""

    def add_peer(self, study: Study, peer: str, timing: Timing | None, refusal: str = "") -> None:
        """Add a peer's timing, or (timing None) the sentence with which it refused the study's problem."""
        row: dict[str, Any] = {
            "study_id": study.id,
            "backend": peer,
            "refusal": refusal,
            "environment_id": self._environment_id,
        }
        if timing:
            row |= {"protocol": timing.protocol, "samples_us": list(timing.samples_us)}
        self._insert(baselines, row)

    def peers(self, study: Study) -> dict[str, list[Timing]]:
        """The peers measured in the study by name, each with its timings in the order recorded."""
        found: dict[str, list[Timing]] = {}
        query = (
            select(baselines)
            .where(baselines.c.study_id == study.id, baselines.c.refusal == "")
            .order_by(baselines.c.id)
        )
        for row in self._read(lambda c: c.execute(query).mappings().all()):
            found.setdefault(plain_text(row["backend"]), []).append(timing_from_row(row))
        return found

    def refusals(self, study: Study) -> dict[str, str]:
        """The peers that refused the study's problem: the last sentence of each, by name."""
        query = (
            select(baselines.c.backend, baselines.c.refusal)
            .where(baselines.c.study_id == study.id, baselines.c.refusal != "")
            .order_by(baselines.c.id)
        )
        rows = self._read(lambda c: c.execute(query).all())
        return {plain_text(peer): plain_text(sentence) for peer, sentence in rows}


class Profiles(Database):
    """Adding and reading what hardware counters said."""

    def add_profile(self, study: Study, profile: Profile, trial_number: int | None) -> None:
        """Add the counters of a trial of the study, or (`trial_number` None) those of `profile.peer`."""
        row = {
            "study_id": study.id,
            "trial_number": trial_number,
            "peer": profile.peer,
            "tool": profile.tool,
            "cache": profile.cache,
            "kernels": [{"kernel": k.kernel, "us": k.us, "counters": k.counters} for k in profile.kernels],
            "environment_id": self._environment_id,
            "created_at": now(),
        }
        self._insert(profiles, row)

    def profile(self, trial_number: int) -> Profile | None:
        """The latest counters of the trial; None without any."""
        query = select(profiles).where(profiles.c.trial_number == trial_number).order_by(profiles.c.id.desc()).limit(1)
        row = self._read(lambda c: c.execute(query).mappings().first())
        return None if row is None else _from_row(row)

    def peer_profiles(self, study: Study) -> dict[str, Profile]:
        """The latest counters of each peer on the study's problem, by its name."""
        query = select(profiles).where(profiles.c.study_id == study.id, profiles.c.trial_number.is_(None))
        rows = self._read(lambda c: c.execute(query.order_by(profiles.c.id)).mappings().all())
        return {profile.peer: profile for profile in map(_from_row, rows)}


def _from_row(row: Row) -> Profile:
    """Raises `StorageError` if a value is not of its kind."""

    def build() -> Profile:
        kernels = tuple(_kernel_from_json(kernel) for kernel in each(dict, row["kernels"], list))
        return Profile(
            plain_text(row["peer"]),
            plain_text(row["tool"]),
            plain_text(row["cache"]),
            kernels,
            plain_text(row["created_at"]),
        )

    return checked(f"Profile {row['id']}", build)


def _kernel_from_json(kernel: dict[str, Any]) -> KernelCounters:
    counters = each((int, float), kernel["counters"], dict)
    return KernelCounters(
        plain_text(kernel["kernel"]),
        float(kernel["us"]),
        {plain_text(name): float(value) for name, value in counters.items()},
    )


class Storage(Studies, Trials, Courses, Peers, Profiles):
    """An open database: `Storage.open(url)`.

    Rows are only ever added. Every method raises `StorageError` where the database fails it."""


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
