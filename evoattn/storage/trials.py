"""The trials of a study: recorded with their sources and samples, read in pages."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, case, exists, func, insert, literal, select, tuple_

from evoattn.model.records import Candidate, CompressedSource, Evaluation, Study, Timing, Trial, TrialState
from evoattn.model.space import KernelConfig
from evoattn.storage.database import Database, now
from evoattn.storage.engine import insert_missing
from evoattn.storage.errors import DamagedRecord, UnknownRecord
from evoattn.storage.rows import (
    EVIDENCE_COLUMNS,
    checked,
    environment_from_row,
    evidence_to_row,
    plain_text,
    timing_from_row,
    timing_to_row,
    trial_from_row,
    unpack_source,
)
from evoattn.storage.schema import STAGES, environments, samples, sources, trials

FINAL = STAGES.index("final")


def leaders(study: Study, limit: int, finalists_first: bool, operator: str | None = None) -> Select[Any]:
    """The query of the best `limit` trials (of those made by `operator`, if given), best first.

    An offline study's are `ESTIMATED`, by relative cost. Else they are `COMPLETE`, by the median of their most trusted
    timing: final before repeat before screen, the last recorded of a stage. The two never mix. A trial that was
    disqualified in a final is left out.

    With `finalists_first`, those of the study's latest final stand before all others: they were timed in turns, and a
    lucky sample taken alone does not beat them; one that left it without a time is none of them. Without, a trial found
    after that final can enter the next one."""
    of_study = [trials.c.study_id == study.id, *([] if operator is None else [trials.c.operator == operator])]
    return _estimated(of_study, limit) if study.offline else _measured(study, of_study, limit, finalists_first)


def _estimated(of_study: Sequence[ColumnElement[bool]], limit: int) -> Select[Any]:
    return (
        select(trials)
        .where(*of_study, trials.c.state == TrialState.ESTIMATED.value)
        .order_by(trials.c.relative_cost, trials.c.number)
        .limit(limit)
    )


def _measured(study: Study, of_study: Sequence[ColumnElement[bool]], limit: int, finalists_first: bool) -> Select[Any]:
    run = samples.c.protocol["run"].as_string()
    ours = exists().where(trials.c.number == samples.c.trial_number, trials.c.study_id == study.id)
    latest_final = (
        select(run)
        .where(samples.c.stage == FINAL, samples.c.median_us < math.inf, ours)
        .order_by(samples.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    in_latest = case((samples.c.stage == FINAL, func.coalesce(run == latest_final, False)), else_=False)
    # The JSON of finals alone is read.
    finalist = (in_latest if finalists_first else literal(False)).label("finalist")
    disqualified = select(samples.c.trial_number).where(
        samples.c.stage == FINAL, samples.c.protocol["disqualified"].as_string().is_not(None)
    )
    later = samples.alias("later")
    superseded = exists().where(
        later.c.trial_number == samples.c.trial_number,
        tuple_(later.c.stage, later.c.id) > tuple_(samples.c.stage, samples.c.id),
        later.c.median_us < math.inf,
    )
    # True of every trial. Without it SQLite goes through them by cost, and looks up their samples in that order: in
    # three times as long.
    by_number = trials.c.reason >= ""
    best = (
        select(samples.c.trial_number, samples.c.median_us, finalist)
        .join(trials, trials.c.number == samples.c.trial_number)
        .where(*of_study, trials.c.state == TrialState.COMPLETE.value, by_number)
        .where(trials.c.number.not_in(disqualified), samples.c.median_us < math.inf, ~superseded)
        .order_by(finalist.desc(), samples.c.median_us, trials.c.number)
        .limit(limit)
        .subquery()
    )
    return (
        select(trials)
        .join(best, best.c.trial_number == trials.c.number)
        .order_by(best.c.finalist.desc(), best.c.median_us, trials.c.number)
    )


PAGE = 500
"""Trials read at a time: memory stays flat however many there are."""


_COLUMNS = [column.name for column in trials.c if not column.primary_key]


@dataclass(frozen=True)
class NewTrial:
    """What is recorded of one evaluation. `source` is None where nothing was rendered."""

    config: KernelConfig
    source: CompressedSource | None
    evaluation: Evaluation
    parents: tuple[int, ...] = ()
    operator: str = ""

    def numbered(self, number: int, study: Study, created_at: str) -> Trial:
        """The trial that it has become."""
        evaluation = self.evaluation
        return Trial(
            number,
            study.id,
            self.config.family,
            self.config.params,
            self.config.id,
            evaluation.state,
            evaluation.reason,
            self.source.hash if self.source else None,
            evaluation.compile_info,
            evaluation.validation,
            evaluation.timings,
            evaluation.relative_cost,
            self.parents,
            self.operator,
            created_at,
            evaluation.seconds,
        )


class Trials(Database):
    """Adding and reading trials."""

    def record(
        self,
        study: Study,
        config: KernelConfig,
        candidate: Candidate | None,
        evaluation: Evaluation,
        parents: Sequence[int] = (),
        operator: str = "",
    ) -> Trial:
        """Add one trial: see `record_all`."""
        source = CompressedSource.of(candidate) if candidate else None
        return self.record_all(study, [NewTrial(config, source, evaluation, tuple(parents), operator)])[0]

    def record_all(self, study: Study, new: Sequence[NewTrial]) -> list[Trial]:
        """Add trials with their sources and samples, all in one transaction; returns them with their numbers."""
        created_at = now()

        def add(connection: Connection) -> Sequence[int]:
            _add_sources(connection, [trial.source for trial in new if trial.source])
            into = insert(trials).returning(trials.c.number, sort_by_parameter_order=True)
            numbers = connection.scalars(into, [self._row(trial, study, created_at) for trial in new]).all()
            timed = zip(numbers, new, strict=True)
            if rows := [self._sample(number, timing) for number, t in timed for timing in t.evaluation.timings]:
                connection.execute(insert(samples), rows)
            return numbers

        return [trial.numbered(n, study, created_at) for n, trial in zip(self._write(add), new, strict=True)]

    def _row(self, new: NewTrial, study: Study, created_at: str) -> dict[str, Any]:
        """All columns but the number: the rows of one statement have the same ones."""
        source, evaluation = new.source, new.evaluation
        return dict.fromkeys(_COLUMNS) | {
            "study_id": study.id,
            "family": new.config.family,
            "config": new.config.params,
            "config_id": new.config.id,
            "state": evaluation.state.value,
            "reason": evaluation.reason,
            "relative_cost": evaluation.relative_cost,
            "parents": list(new.parents),
            "operator": new.operator,
            "source_hash": source and source.hash,
            "created_at": created_at,
            "seconds": evaluation.seconds,
            **evidence_to_row(evaluation.compile_info, evaluation.validation),
            "environment_id": self._environment_id,
        }

    def add_timing(self, trial_number: int, timing: Timing) -> None:
        """Add samples to a recorded trial, e.g. of the final."""
        self._insert(samples, self._sample(trial_number, timing))

    def _sample(self, trial_number: int, timing: Timing) -> dict[str, Any]:
        return {"trial_number": trial_number, "environment_id": self._environment_id, **timing_to_row(timing)}

    def trial(self, number: int) -> Trial:
        """The trial with this number, of whatever study. Raises `UnknownRecord`."""
        found = self._read(lambda c: _load(c, select(trials).where(trials.c.number == number)))
        if not found:
            raise UnknownRecord(
                f"There is no trial {number} in {self.place}; `evoattn report --full` shows the numbers of the best."
            )
        return found[0]

    def environments(self, trial: Trial) -> list[dict[str, str]]:
        """Where the trial ran: first where it was evaluated, then where it was timed since, e.g. in a final after a
        resume.

        Empty for a trial that an older evoattn recorded; the facts from when its study was made are in
        `Study.versions`."""
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
        return [environment_from_row(row) for row in self._read(lambda c: c.execute(query).mappings().all())]

    def source(self, source_hash: str) -> str:
        """The rendered text with this sha256. Raises `StorageError` if it is missing or is not that text."""
        packed = self._read(lambda c: c.scalar(select(sources.c.zlib).where(sources.c.hash == source_hash)))
        return unpack_source(source_hash, packed or b"")

    def iter_trials(
        self,
        study: Study,
        evidence: bool = False,
        after: int = -1,
        whole_only: bool = False,
        among: Iterable[int] | None = None,
    ) -> Iterator[Trial]:
        """The trials of the study by number, from the one that follows number `after`. `evidence`: with what compiler
        and validation said, which is slow to read; else None. `whole_only`: a damaged one is passed over with a
        warning, where it raises `DamagedRecord` else. `among`: those of these numbers alone.

        Reads `PAGE` at a time and holds no transaction between, so that memory stays flat and others may write."""
        columns = [c for c in trials.c if evidence or c.name not in EVIDENCE_COLUMNS]
        last, wanted = after, None if among is None else iter(sorted(among))
        while True:
            page = (
                select(*columns)
                .where(trials.c.study_id == study.id, trials.c.number > last)
                .order_by(trials.c.number)
                .limit(PAGE)
            )
            if wanted is not None:
                page = page.where(trials.c.number.in_(list(islice(wanted, PAGE))))
            try:
                found = self._read(partial(_load, query=page))
            except DamagedRecord:
                if not whole_only:
                    raise
                numbers = self._read(partial(_numbers, query=page))
                yield from self._whole(columns, numbers)
                last = numbers[-1]
                continue
            if not found:
                return
            yield from found
            last = found[-1].number

    def _whole(self, columns: Sequence[Column[Any]], numbers: Sequence[int]) -> Iterator[Trial]:
        """Those of the trials that are not damaged, and a warning about each of the others."""
        for number in numbers:
            try:
                yield from self._read(partial(_load, query=select(*columns).where(trials.c.number == number)))
            except DamagedRecord as error:
                warnings.warn(f"Passed over: {error}", RuntimeWarning, stacklevel=3)

    def leaderboard(
        self, study: Study, limit: int, finalists_first: bool = True, operator: str | None = None
    ) -> list[Trial]:
        """The best `limit` trials (of those made by `operator`, if given), best first: see
        `evoattn.storage.trials`."""
        query = leaders(study, limit, finalists_first, operator)
        return self._read(lambda c: _load(c, query))

    def numbers(self, study: Study, most: int) -> tuple[list[int], int]:
        """Of the study's trials, in order, and how many there are; of more than `most` the better half of as many and
        an even sample, with the last."""
        every = select(trials.c.number).where(trials.c.study_id == study.id).order_by(trials.c.number)
        found = self._read(lambda c: c.scalars(every).all())
        if len(found) <= most:
            return list(found), len(found)
        best = leaders(study, most // 2, False).with_only_columns(trials.c.number)
        sample = found[:: -(len(found) // (most // 2))]
        return sorted({*self._read(lambda c: c.scalars(best).all()), *sample}), len(found)

    def count_finals(self, study: Study) -> int:
        """Timings that were taken in finals of the study."""
        query = select(func.count()).select_from(samples).join(trials, trials.c.number == samples.c.trial_number)
        query = query.where(trials.c.study_id == study.id, samples.c.stage == FINAL)
        return int(self._read(lambda c: c.scalar(query)) or 0)

    def counts(self, study: Study) -> dict[TrialState, int]:
        """Trials of the study by state; states without a trial are left out. Raises `StorageError` for an unknown
        state."""
        query = select(trials.c.state, func.count()).where(trials.c.study_id == study.id).group_by(trials.c.state)
        rows = self._read(lambda c: c.execute(query).all())
        return checked(f"A trial of study {study.name}", lambda: {TrialState(state): count for state, count in rows})

    def failures(self, study: Study, limit: int = 50) -> list[tuple[TrialState, str, int]]:
        """The `limit` most frequent (state, reason, count) of the trials that failed, most frequent first.

        Those are all but the `COMPLETE`, the `ESTIMATED` and the `PRUNED`. Raises `StorageError` for an unknown state.
        """
        good = [TrialState.COMPLETE.value, TrialState.ESTIMATED.value, TrialState.PRUNED.value]
        query = (
            select(trials.c.state, trials.c.reason, func.count())
            .where(trials.c.study_id == study.id, trials.c.state.not_in(good))
            .group_by(trials.c.state, trials.c.reason)
            .order_by(func.count().desc(), trials.c.state, trials.c.reason)
            .limit(limit)
        )
        rows = self._read(lambda c: c.execute(query).all())
        return checked(
            f"A trial of study {study.name}",
            lambda: [(TrialState(s), plain_text(why), count) for s, why, count in rows],
        )


def _add_sources(connection: Connection, texts: Sequence[CompressedSource]) -> None:
    """Those that are not there yet. Most of a resumed study are: they are asked for before they are sent."""
    packed = {text.hash: text.zlib for text in texts}
    if packed:
        there = set(connection.scalars(select(sources.c.hash).where(sources.c.hash.in_(packed))))
        rows = [{"hash": key, "zlib": data} for key, data in packed.items() if key not in there]
        if rows:
            insert_missing(connection, sources, rows)


def _numbers(connection: Connection, query: Select[Any]) -> Sequence[int]:
    """Those of the trials of a query, in its order."""
    return connection.scalars(query.with_only_columns(trials.c.number)).all()


def _load(connection: Connection, query: Select[Any]) -> list[Trial]:
    """The trials of a query on `trials`, in its order, each with its timings in order of trust."""
    found = connection.execute(query)
    names = tuple(found.keys())
    rows = [dict(zip(names, row, strict=True)) for row in found]  # a `RowMapping` is slow to read
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
