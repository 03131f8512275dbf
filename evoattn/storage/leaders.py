"""Which trials lead a study."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import Select, func, literal, select

from evoattn.model.records import Study, TrialState
from evoattn.storage.schema import STAGES, samples, trials

FINAL = STAGES.index("final")


def leaders(study: Study, limit: int, finalists_first: bool) -> Select[Any]:
    """The query of the best `limit` trials, best first.

    An offline study's are `ESTIMATED`, by relative cost. Else they are `COMPLETE`, by the median of their most trusted
    timing: final before repeat before screen, the last recorded of a stage. The two never mix. A trial that was
    disqualified in a final is left out.

    With `finalists_first`, those of the study's latest final stand before all others: they were timed in turns, and a
    lucky sample taken alone does not beat them; one that left it without a time is none of them. Without, a trial found
    after that final can enter the next one.
    """
    return _estimated(study, limit) if study.offline else _measured(study, limit, finalists_first)


def _estimated(study: Study, limit: int) -> Select[Any]:
    return (
        select(trials)
        .where(trials.c.study_id == study.id, trials.c.state == TrialState.ESTIMATED.value)
        .order_by(trials.c.relative_cost, trials.c.number)
        .limit(limit)
    )


def _measured(study: Study, limit: int, finalists_first: bool) -> Select[Any]:
    run = samples.c.protocol["run"].as_string()
    latest_final = (
        select(run)
        .join(trials, trials.c.number == samples.c.trial_number)
        .where(
            trials.c.study_id == study.id,
            samples.c.stage == FINAL,
            samples.c.median_us < math.inf,
        )
        .order_by(samples.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    finalist = func.coalesce(run == latest_final, False) if finalists_first else literal(False)
    disqualified = select(samples.c.trial_number).where(
        samples.c.stage == FINAL, samples.c.protocol["disqualified"].as_string().is_not(None)
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
    return (
        select(trials)
        .join(ranked, ranked.c.trial_number == trials.c.number)
        .where(ranked.c.rank == 1)
        .order_by(ranked.c.finalist.desc(), ranked.c.median_us, trials.c.number)
        .limit(limit)
    )
