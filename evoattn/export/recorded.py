"""A recorded kernel on its way out of the database: checked against its hash, with what today's family says of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Trial
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage, StorageError


@dataclass(frozen=True)
class Recorded:
    """A trial of whatever state that has a source, and its launches for the problem of its study."""

    study: Study
    trial: Trial
    source: str
    problem: AttentionProblem
    family: Family
    config: KernelConfig
    launches: tuple[KernelLaunch, ...]
    workspace: dict[str, int]

    @classmethod
    def read(cls, storage: Storage, trial: Trial, known: tuple[str, ...] = ("scale",)) -> Recorded:
        """`known` are the variants that the format knows.

        Raises `StorageError` if the trial has no source, if its source or its record is not what this version wrote, if
        today's launches do not fit the source, or if its problem has another variant, and `FamilyError` if its family
        is not here any more.
        """
        if trial.source_hash is None:
            raise StorageError(
                f"Trial {trial.number} ({trial.state}) never became source, and cannot be exported; choose another "
                "trial."
            )
        source = storage.source(trial.source_hash)
        if hashlib.sha256(source.encode()).hexdigest() != trial.source_hash:
            raise StorageError(
                f"The source of trial {trial.number} is not what was recorded; use another copy of the database."
            )
        study = storage.study(trial.study_id)
        problem, family = AttentionProblem(**study.problem), registry.lookup(trial.family)
        asked = (*problem.variants, *["scale"] * (problem.scale is not None))
        if unknown := [variant for variant in asked if variant not in known]:
            raise StorageError(
                f"This export does not know {', '.join(unknown)}; take --format check, or call the kernel by "
                "`evoattn.load`."
            )
        config = KernelConfig(trial.family, trial.config)
        if outdated := family.why_outdated(config, source):
            raise StorageError(f"{outdated} Export trial {trial.number} with the evoattn that made it.")
        try:
            gpu = study.spec
            launches, workspace = family.launches(problem, config, gpu), family.workspace(problem, config, gpu)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise StorageError(
                f"Trial {trial.number} is not of this version's {trial.family} ({error!r}); export it with the evoattn "
                "that made it."
            ) from None
        return cls(study, trial, source, problem, family, config, launches, workspace)
