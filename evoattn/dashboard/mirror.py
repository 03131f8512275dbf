"""A study of ours as a study of Optuna, held in memory: the database is only read."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, BinaryIO

import optuna
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from evoattn.families.registry import load_space
from evoattn.model.gpu import GpuError
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Trial
from evoattn.model.records import TrialState as State
from evoattn.model.space import ConfigError
from evoattn.storage import Storage, StorageError

ARTIFACT = "artifacts:"
"""What optuna-dashboard looks for among a trial's system attributes. Optuna's own `upload_artifact` refuses a trial
that has ended, as all of ours have."""


UNKNOWN = datetime(1970, 1, 1)
"""In place of a time."""
MOST_SHOWN = 5_000
"""Trials: a browser gets all of them as one piece of JSON, six kilobytes each."""


class Sources:
    """An artifact store of Optuna over the sources of a database: an artifact's id is the sha256 of its text."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """The text as UTF-8. Raises `ArtifactNotFound`."""
        try:
            return io.BytesIO(self._storage.source(artifact_id).encode())
        except StorageError as error:
            raise ArtifactNotFound(str(error)) from None

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        """Raises `StorageError`: the database is only read."""
        raise StorageError("evoattn's dashboard only shows; it keeps nothing.")

    def remove(self, artifact_id: str) -> None:
        """Raises `StorageError`: the database is only read."""
        raise StorageError("evoattn's dashboard only shows; it keeps nothing.")


class _Kept(FrozenTrial):
    """One that nobody changes, so that the storage need not copy it: for 200,000 trials that takes minutes."""

    def __deepcopy__(self, memo: object) -> _Kept:
        return self


class Mirror:
    """One study of ours in an Optuna storage of its own. `update` adds what was recorded since."""

    def __init__(self, storage: Storage, study: Study, most: int = MOST_SHOWN) -> None:
        """Of a study of more trials than `most` it shows the best and an even sample. Raises `StorageError` where the
        database fails, as `update` does."""
        self._storage, self._study, self._most = storage, study, most
        self.optuna_storage = InMemoryStorage()
        self._last, self._finals = -1, 0
        self._values: dict[str, tuple[Any, ...]] = {}
        self._choices: dict[str, CategoricalDistribution] = {}
        self._begin()

    @property
    def trials(self) -> int:
        """Trials that it shows."""
        return self.optuna_storage.get_n_trials(self._id)

    def update(self) -> bool:
        """Add the trials recorded since. True where that cannot be done, as what is shown already has changed: a final
        was held, or a parameter has a value that it did not have. A new mirror is needed then."""
        new = list(self._storage.iter_trials(self._study, after=self._last, whole_only=True))
        if self._storage.count_finals(self._study) != self._finals:
            return True
        if any(value not in self._values.get(name, ()) for trial in new for name, value in self._params(trial).items()):
            return True
        self._add(new)
        return False

    def _begin(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", ExperimentalWarning)  # names of metrics
        warnings.filterwarnings("ignore", "Some regimes for parameter")  # of importances, on every view of the page
        study = self._study
        mirrored = optuna.create_study(storage=self.optuna_storage, study_name=study.name, direction="minimize")
        mirrored.set_metric_names(["relative cost" if study.offline else "median µs"])
        for name, value in _facts(study).items():
            mirrored.set_user_attr(name, value)
        self._id = self.optuna_storage.get_study_id_from_name(study.name)
        self._finals = self._storage.count_finals(study)
        numbers, there = self._storage.numbers(study, self._most)
        if there > len(numbers):
            shown = f"{len(numbers)} of {there} trials: the best, and an even sample of all"
            mirrored.set_user_attr("shown", shown)
        trials = list(self._storage.iter_trials(study, whole_only=True, among=numbers))
        self._values = self._all_values(trials)
        self._choices = {name: CategoricalDistribution(values) for name, values in self._values.items()}
        self._add(trials)

    def _add(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.optuna_storage.create_new_trial(self._id, self._as_optuna(trial))
            self._last = trial.number

    def _params(self, trial: Trial) -> dict[str, Any]:
        """By name; families of one study have parameters of one name with other values, so theirs come with the
        family's name."""
        if len(self._study.families) == 1:
            return dict(trial.config)
        return {"family": trial.family} | {f"{trial.family}.{name}": value for name, value in trial.config.items()}

    def _all_values(self, trials: list[Trial]) -> dict[str, tuple[Any, ...]]:
        """The choices of each parameter: those of today's search space, and whatever else was tried."""
        found: dict[str, dict[Any, None]] = {}
        several = len(self._study.families) > 1
        for family in self._study.families:
            if several:
                found.setdefault("family", {})[family] = None
            for name, values in _space(self._study, family).items():
                found[f"{family}.{name}" if several else name] = dict.fromkeys(values)
        for trial in trials:
            for name, value in self._params(trial).items():
                found.setdefault(name, {})[value] = None
        return {name: tuple(values) for name, values in found.items()}

    def _as_optuna(self, trial: Trial) -> FrozenTrial:
        value = trial.value
        params = self._params(trial)
        start, end = _from_to(trial)
        return _Kept(
            number=-1,
            trial_id=-1,
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
            value=value,
            datetime_start=start,
            datetime_complete=end,
            params=params,
            distributions={name: self._choices[name] for name in params},
            user_attrs=_attributes(trial),
            system_attrs=_artifact(trial),
            intermediate_values={},
        )


def _from_to(trial: Trial) -> tuple[datetime, datetime]:
    """When it began and ended, in local time. Both are the beginning of all time where a record says nothing sensible:
    Optuna has no ended trial without them."""
    try:
        end = datetime.fromisoformat(trial.created_at).astimezone().replace(tzinfo=None)
        return end - timedelta(seconds=trial.seconds), end
    except (ValueError, OverflowError):
        return UNKNOWN, UNKNOWN


def _space(study: Study, family: str) -> Mapping[str, Iterable[Any]]:
    """Today's values of each parameter; empty where this version does not know the GPU or the family."""
    try:
        return {p.name: p.values for p in load_space(family, study.spec).parameters}
    except (ConfigError, GpuError):
        return {}


def _facts(study: Study) -> dict[str, str]:
    problem = AttentionProblem(**study.problem)
    return {
        "problem": problem.describe(),
        "gpu": study.versions.get("device", study.gpu) + (", compiled for and not run on" if study.offline else ""),
        "sampler": f"{study.sampler}, seed {study.seed}",
        "families": ", ".join(study.families),
        "versions": ", ".join(f"{name} {version}" for name, version in study.versions.items()),
    }


def _attributes(trial: Trial) -> dict[str, Any]:
    """What the page of a trial says beside its parameters."""
    found: dict[str, Any] = {"trial": trial.number, "state": trial.state.value, "made by": trial.operator}
    if said := trial.disqualified or trial.reason:
        found["reason"] = said
    if trial.parents:
        found["parents"] = ", ".join(map(str, trial.parents))
    if trial.timing:
        found["timed in"] = str(trial.timing.protocol.get("stage", ""))
    if trial.state is not State.ESTIMATED and trial.relative_cost is not None:
        found["estimated relative cost"] = trial.relative_cost
    return found


def _artifact(trial: Trial) -> dict[str, Any]:
    """The source, as plain text: a browser would offer to save what it is told is CUDA."""
    if trial.source_hash is None:
        return {}
    name = f"trial{trial.number}_{trial.family}.cu"
    said = {"artifact_id": trial.source_hash, "filename": name, "mimetype": "text/plain", "encoding": "utf-8"}
    return {f"{ARTIFACT}{trial.source_hash}": json.dumps(said)}
