"""The database as the rest of evoattn sees it: records in, records out, sentences for what goes wrong."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Self

from sqlalchemy import URL, Connection, Select, exists, func, insert, literal, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import data_folder
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import SM_COUNT, Candidate, Evaluation, Study, Timing, Trial, TrialState
from evoattn.model.space import KernelConfig
from evoattn.storage import engine as database
from evoattn.storage import lock
from evoattn.storage.errors import StorageError, UnknownRecord, explain
from evoattn.storage.rows import (
    EVIDENCE_COLUMNS,
    environment_from_row,
    evidence_to_row,
    pack_source,
    plain_text,
    study_from_row,
    timing_from_row,
    timing_to_row,
    trial_from_row,
    unpack_source,
)
from evoattn.storage.schema import REVISION, STAGES, baselines, environments, samples, sources, studies, trials

PAGE = 500
"""Trials read at a time: memory stays flat however many there are."""
NAMED_STUDIES = 10
"""Studies that a sentence about an unknown one names."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Storage:
    """An open database. Rows are only ever added. Every method raises `StorageError` where the database fails it."""

    def __init__(self, url: URL) -> None:
        """Use `Storage.open`."""
        self.url = url
        self._engine = database.connect(url)
        self._writer = self._engine.execution_options(writes=True)
        self._environment_id: int | None = None

    @classmethod
    def open(cls, url: str, create: bool = True) -> Self:
        """Open the database at a SQLAlchemy URL or a file path, brought to this version's tables; a read-only one serves reading.

        The user's data folder is made if it is not there yet; no other folder is.
        Raises `StorageError` if it is missing (and not `create`), another program's, of a newer evoattn, or cannot be opened.
        """
        storage = cls(database.parse_url(url))
        where = database.place(storage.url)
        if not create and storage.url.get_backend_name() == "sqlite" and not Path(where).exists():
            raise StorageError(
                f"There is no database at {where}; run `evoattn search` first, or choose another with --db."
            )
        if create and Path(where).parent == data_folder():
            data_folder().mkdir(parents=True, exist_ok=True)
        with storage._explained():
            with storage._engine.connect() as connection:
                current = database.revision(connection, where)
            if current is None and not create:
                raise StorageError(
                    f"The database {where} is empty; run `evoattn search` first, or choose another with --db."
                )
            if current != REVISION:
                with storage._writer.begin() as connection:  # asked again: another process may have done it meanwhile
                    if (current := database.revision(connection, where)) != REVISION:
                        database.migrate(connection, current, where)
        return storage

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, sqlite3.Error) as error:
            raise explain(error, database.place(self.url)) from None
        except (JSONDecodeError, RecursionError):
            raise StorageError(
                f"The database {database.place(self.url)} holds a value that is not JSON; use another copy of it."
            ) from None

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._explained(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """One transaction: all that is written in it is kept, or none."""
        with self._explained(), self._writer.begin() as connection:
            yield connection

    @property
    def place(self) -> str:
        """Where the database is, for people: a path, or a URL without its password."""
        return database.place(self.url)

    # -- studies --------------------------------------------------------------------------------------------------------------

    def create_study(
        self,
        name: str,
        problem: AttentionProblem,
        gpu: GpuSpec,
        offline: bool,
        sampler: str,
        seed: int,
        families: Sequence[str],
        versions: dict[str, str],
        options: dict[str, Any],
    ) -> Study:
        """Record a new study. Raises `StorageError` if the name is taken."""
        row = {
            "name": name,
            "gpu": gpu.name,
            "arch": gpu.arch,
            "offline": offline,
            "sampler": sampler,
            "seed": seed,
            "problem": problem.to_dict(),
            "families": list(families),
            "versions": versions,
            "options": options | {SM_COUNT: gpu.sm_count},
            "created_at": _now(),
        }
        with self._writing() as connection:
            try:
                (study_id,) = connection.execute(insert(studies).values(row)).inserted_primary_key
            except IntegrityError:
                raise StorageError(
                    f"The study {name!r} is there already; go on with it by --resume, or choose another --study."
                ) from None
        return study_from_row({"id": study_id, **row})

    def studies(self) -> list[Study]:
        """All studies, oldest first."""
        return self._select_studies(select(studies).order_by(studies.c.id))

    def study(self, study_id: int) -> Study:
        """The study with this id, as trials name it. Raises `UnknownRecord`."""
        for study in self._select_studies(select(studies).where(studies.c.id == study_id)):
            return study
        raise UnknownRecord(
            f"There is no study {study_id} in {database.place(self.url)}; `evoattn report` shows the latest."
        )

    def find_study(self, name: str) -> Study | None:
        return next(iter(self._select_studies(select(studies).where(studies.c.name == name))), None)

    def latest_study(self) -> Study | None:
        """The latest study that has a trial, else the latest of all; None in an empty database."""
        tried = exists().where(trials.c.study_id == studies.c.id)
        query = select(studies).order_by(tried.desc(), studies.c.id.desc()).limit(1)
        return next(iter(self._select_studies(query)), None)

    def chosen_study(self, name: str | None) -> Study:
        """The study called `name`, else the latest. Raises `UnknownRecord`, which names the latest of those that are there."""
        if study := self.find_study(name) if name else self.latest_study():
            return study
        place, names = database.place(self.url), [study.name for study in self.studies()]
        if not names:
            raise UnknownRecord(f"There is no study in {place} yet; start with `evoattn search`.")
        has = "it has" if len(names) <= NAMED_STUDIES else "its latest are"
        raise UnknownRecord(f"There is no study {name!r} in {place}; {has} {', '.join(names[-NAMED_STUDIES:])}.")

    def _select_studies(self, query: Select) -> list[Study]:
        with self._reading() as connection:
            return [study_from_row(row) for row in connection.execute(query).mappings()]

    def lock_study(self, study: Study) -> AbstractContextManager[None]:
        """Hold the study for one search; ends with the process, however that ends. Raises `StorageError` if another search holds it."""
        return lock.lock_study(self.url, study)

    # -- writing --------------------------------------------------------------------------------------------------------------

    def use_environment(self, facts: dict[str, str]) -> None:
        """All that is recorded from now on ran here: `facts` as `evoattn.storage.versions.collect` gives them, added unless they are there."""
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        with self._writing() as connection:
            found = connection.scalar(select(environments.c.id).where(environments.c.hash == key))
            if found is None:
                (found,) = connection.execute(
                    insert(environments).values(hash=key, facts=facts, created_at=_now())
                ).inserted_primary_key
        self._environment_id = found

    def record(
        self,
        study: Study,
        config: KernelConfig,
        candidate: Candidate | None,
        evaluation: Evaluation,
        parents: Sequence[int] = (),
        operator: str = "",
    ) -> Trial:
        """Add a trial with its source and samples, all in one transaction; returns it with its number.

        `candidate` is None where nothing was rendered.
        """
        row = {
            "study_id": study.id,
            "family": config.family,
            "config": config.params,
            "config_id": config.id,
            "state": evaluation.state.value,
            "reason": evaluation.reason,
            "relative_cost": evaluation.relative_cost,
            "parents": list(parents),
            "operator": operator,
            "source_hash": candidate and candidate.source_hash,
            "created_at": _now(),
            "seconds": evaluation.seconds,
            **evidence_to_row(evaluation.compile_info, evaluation.validation),
            "environment_id": self._environment_id,
        }
        with self._writing() as connection:
            if candidate:
                new = select(literal(candidate.source_hash), literal(pack_source(candidate.source))).where(
                    ~exists().where(sources.c.hash == candidate.source_hash)
                )
                connection.execute(insert(sources).from_select(["hash", "zlib"], new))
            (number,) = connection.execute(insert(trials).values(row)).inserted_primary_key
            for timing in evaluation.timings:
                connection.execute(
                    insert(samples).values(
                        trial_number=number, environment_id=self._environment_id, **timing_to_row(timing)
                    )
                )
        return Trial(
            number,
            study.id,
            config.family,
            config.params,
            config.id,
            evaluation.state,
            evaluation.reason,
            row["source_hash"],
            evaluation.compile_info,
            evaluation.validation,
            evaluation.timings,
            evaluation.relative_cost,
            tuple(parents),
            operator,
            row["created_at"],
            evaluation.seconds,
        )

    def add_timing(self, trial_number: int, timing: Timing) -> None:
        """Add samples to a recorded trial, e.g. of the final."""
        with self._writing() as connection:
            connection.execute(
                insert(samples).values(
                    trial_number=trial_number, environment_id=self._environment_id, **timing_to_row(timing)
                )
            )

    def add_baseline(self, study: Study, backend: str, timing: Timing | None, refusal: str = "") -> None:
        """Add a competitor's timing, or (timing None) the sentence with which it refused the study's problem."""
        row = {"study_id": study.id, "backend": backend, "refusal": refusal, "environment_id": self._environment_id}
        if timing:
            row |= {"protocol": timing.protocol, "samples_us": list(timing.samples_us)}
        with self._writing() as connection:
            connection.execute(insert(baselines).values(row))

    # -- reading --------------------------------------------------------------------------------------------------------------

    def trial(self, number: int) -> Trial:
        """The trial with this number, of whatever study. Raises `UnknownRecord`."""
        with self._reading() as connection:
            found = _load(connection, select(trials).where(trials.c.number == number))
        if not found:
            raise UnknownRecord(
                f"There is no trial {number} in {database.place(self.url)}; `evoattn report` lists the trials."
            )
        return found[0]

    def environments(self, trial: Trial) -> list[dict[str, str]]:
        """Where the trial ran: first where it was evaluated, then where else it was timed since, e.g. in a final after a resume.

        Empty for a trial that was recorded before environments were; what was so when its study was made is in `Study.versions`.
        """
        places = (
            select(trials.c.environment_id, literal(0).label("order"))
            .where(trials.c.number == trial.number)
            .union(select(samples.c.environment_id, samples.c.id).where(samples.c.trial_number == trial.number))
            .subquery()
        )
        query = (
            select(environments)
            .join(places, places.c.environment_id == environments.c.id)
            .group_by(environments.c.id)
            .order_by(func.min(places.c.order))
        )
        with self._reading() as connection:
            return [environment_from_row(row) for row in connection.execute(query).mappings()]

    def source(self, source_hash: str) -> str:
        """The rendered text with this sha256. Raises `StorageError` if it is missing or is not that text."""
        with self._reading() as connection:
            packed = connection.scalar(select(sources.c.zlib).where(sources.c.hash == source_hash))
        return unpack_source(source_hash, packed)

    def iter_trials(self, study: Study, evidence: bool = False) -> Iterator[Trial]:
        """All trials of the study by number; what compiler and validation said, most of the work of reading, only if asked for (else None).

        Reads `PAGE` at a time and holds no transaction between, so that memory stays flat and others may write.
        """
        columns = [c for c in trials.c if evidence or c.name not in EVIDENCE_COLUMNS]
        last = -1
        while True:
            page = (
                select(*columns)
                .where(trials.c.study_id == study.id, trials.c.number > last)
                .order_by(trials.c.number)
                .limit(PAGE)
            )
            with self._reading() as connection:
                found = _load(connection, page)
            if not found:
                return
            yield from found
            last = found[-1].number

    def leaderboard(
        self, study: Study, limit: int, finalists_first: bool = True, operator: str | None = None
    ) -> list[Trial]:
        """The best `limit` trials (of those made by `operator`, if given), best first: `ESTIMATED` ones by relative cost in an offline
        study, else `COMPLETE` ones by the median of their most trusted timing (final before repeat before screen; the last recorded of a
        stage). The two never mix.

        With `finalists_first`, those of the study's latest final stand before all others: they were timed in turns, and a lucky
        sample taken alone does not beat them; one that left it without a time (its median there is infinite) is none of them. Without,
        a trial found after that final can enter the next one. Who was disqualified in a final is left out.
        """
        if study.offline:
            query = (
                select(trials)
                .where(trials.c.study_id == study.id, trials.c.state == TrialState.ESTIMATED.value)
                .order_by(trials.c.relative_cost, trials.c.number)
                .limit(limit)
            )
        else:
            run = samples.c.protocol["run"].as_string()
            latest_final = (
                select(run)
                .join(trials, trials.c.number == samples.c.trial_number)
                .where(
                    trials.c.study_id == study.id,
                    samples.c.stage == STAGES.index("final"),
                    samples.c.median_us < math.inf,
                )
                .order_by(samples.c.id.desc())
                .limit(1)
                .scalar_subquery()
            )
            finalist = func.coalesce(run == latest_final, False) if finalists_first else literal(False)
            disqualified = select(samples.c.trial_number).where(
                samples.c.stage == STAGES.index("final"), samples.c.protocol["disqualified"].as_string().is_not(None)
            )
            rank = func.row_number().over(
                partition_by=samples.c.trial_number, order_by=[samples.c.stage.desc(), samples.c.id.desc()]
            )
            ranked = (
                select(samples.c.trial_number, samples.c.median_us, finalist.label("finalist"), rank.label("rank"))
                .join(trials, trials.c.number == samples.c.trial_number)
                .where(trials.c.study_id == study.id, trials.c.state == TrialState.COMPLETE.value)
                .where(trials.c.number.not_in(disqualified), samples.c.median_us < math.inf)
                .subquery()
            )
            query = (
                select(trials)
                .join(ranked, ranked.c.trial_number == trials.c.number)
                .where(ranked.c.rank == 1)
                .order_by(ranked.c.finalist.desc(), ranked.c.median_us, trials.c.number)
                .limit(limit)
            )
        if operator is not None:
            query = query.where(trials.c.operator == operator)
        with self._reading() as connection:
            return _load(connection, query)

    def counts(self, study: Study) -> dict[TrialState, int]:
        """Trials of the study by state; states without a trial are left out."""
        query = select(trials.c.state, func.count()).where(trials.c.study_id == study.id).group_by(trials.c.state)
        with self._reading() as connection:
            return {TrialState(state): count for state, count in connection.execute(query)}

    def failures(self, study: Study, limit: int = 50) -> list[tuple[TrialState, str, int]]:
        """The `limit` most frequent (state, reason, count) of trials that are neither `COMPLETE` nor `ESTIMATED`, most frequent first."""
        good = [TrialState.COMPLETE.value, TrialState.ESTIMATED.value]
        query = (
            select(trials.c.state, trials.c.reason, func.count())
            .where(trials.c.study_id == study.id, trials.c.state.not_in(good))
            .group_by(trials.c.state, trials.c.reason)
            .order_by(func.count().desc(), trials.c.state, trials.c.reason)
            .limit(limit)
        )
        with self._reading() as connection:
            return [
                (TrialState(state), plain_text(reason), count) for state, reason, count in connection.execute(query)
            ]

    def baselines(self, study: Study) -> dict[str, list[Timing]]:
        """The competitors measured in the study by backend, each with its timings in the order recorded."""
        found: dict[str, list[Timing]] = {}
        query = (
            select(baselines)
            .where(baselines.c.study_id == study.id, baselines.c.refusal == "")
            .order_by(baselines.c.id)
        )
        with self._reading() as connection:
            for row in connection.execute(query).mappings():
                found.setdefault(plain_text(row["backend"]), []).append(timing_from_row(row))
        return found

    def refusals(self, study: Study) -> dict[str, str]:
        """The competitors that refused the study's problem: the last sentence of each, by backend."""
        query = select(baselines.c.backend, baselines.c.refusal).where(
            baselines.c.study_id == study.id, baselines.c.refusal != ""
        )
        with self._reading() as connection:
            return {
                plain_text(backend): plain_text(sentence)
                for backend, sentence in connection.execute(query.order_by(baselines.c.id))
            }


def _load(connection: Connection, query: Select) -> list[Trial]:
    """The trials of a query on `trials`, in its order, each with its timings in order of trust."""
    rows = connection.execute(query).mappings().all()
    timings: dict[int, list[Timing]] = {row["number"]: [] for row in rows}
    numbers = list(timings)
    for first in range(0, len(numbers), PAGE):  # a statement may have only so many parameters
        wanted = (
            select(samples)
            .where(samples.c.trial_number.in_(numbers[first : first + PAGE]))
            .order_by(samples.c.trial_number, samples.c.stage, samples.c.id)
        )
        for sample in connection.execute(wanted).mappings():
            timings[sample["trial_number"]].append(timing_from_row(sample))
    return [trial_from_row(row, tuple(timings[row["number"]])) for row in rows]
