"""What the trials of a study say together: progress, failures, lineage, the cost model's rank."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

import numpy as np

from evoattn.model.records import Study, Trial, TrialState, is_positive
from evoattn.report.rows import Ancestor, CostModelRank, FailureGroup, Progress

MIN_TRIALS_TO_CORRELATE = 10
MAX_ANCESTORS = 24
MAX_REASON = 240


Results = dict[str, list[tuple[Trial, float]]]
"""By family: its right trials with their times in µs, or their relative costs, best first."""


def right_trials(trials: Iterable[Trial]) -> Results:
    """The right trials by family; families without one are left out."""
    found: Results = {}
    for trial in trials:
        if (value := trial.value) is not None:
            found.setdefault(trial.family, []).append((trial, value))
    return {family: sorted(pairs, key=lambda pair: pair[1]) for family, pairs in found.items()}


def _seconds_between(start: str, end: str) -> float:
    try:
        return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def progress(study: Study, trials: Iterable[Trial]) -> Progress:
    """The right candidates in the order tried; `trials` by number."""
    course = Progress("relative_cost" if study.offline else "median_us", [], [], [], [], [])
    best = float("inf")
    for trial in trials:
        value = trial.value
        if value is None:
            continue
        if value < best:
            best = value
            course.improvements.append(len(course.value))
        course.trial.append(trial.number)
        course.elapsed_s.append(_seconds_between(study.created_at, trial.created_at))
        course.family.append(trial.family)
        course.value.append(value)
    return course


def group_failures(failures: Iterable[tuple[TrialState, str, int]]) -> tuple[FailureGroup, ...]:
    """Failures by state and reason, most frequent first; reasons that differ only in numbers are one group.

    Only the first line of a reason is kept, and of a long one its beginning.
    """
    groups: dict[tuple[str, str], Counter[str]] = {}
    for state, reason, count in failures:
        first = next(iter(reason.strip().splitlines()), "")
        text = first if len(first) <= MAX_REASON else first[:MAX_REASON] + "…"
        key = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
        groups.setdefault((state.value, key), Counter())[text] += count
    rows = [
        FailureGroup(state, reasons.most_common(1)[0][0], reasons.total(), len(reasons))
        for (state, _), reasons in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.count, row.state, row.reason)))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def rank_cost_model(trials: Iterable[Trial]) -> CostModelRank | None:
    """Spearman's correlation (Pearson's over ranks) of `relative_cost` with the median over `COMPLETE` trials; None
    below 10 of them."""
    right = [(t.relative_cost, t.value) for t in trials if t.state is TrialState.COMPLETE]
    pairs = [(cost, us) for cost, us in right if us is not None and cost is not None and is_positive(cost)]
    if len(pairs) < MIN_TRIALS_TO_CORRELATE:
        return None
    cost, time = (_ranks(column) for column in zip(*pairs, strict=True))
    if cost.std() == 0 or time.std() == 0:
        return None
    return CostModelRank(float(np.corrcoef(cost, time)[0, 1]), len(pairs))


def lineage(best: Trial | None, trials: dict[int, Trial]) -> tuple[Ancestor, ...]:
    """`best` and its ancestors, youngest first, at most `MAX_ANCESTORS`; parents that are not in the study are passed
    over."""
    found: dict[int, Trial] = {}
    front = [best] if best else []
    while front and len(found) < MAX_ANCESTORS:
        trial = max(front, key=lambda t: t.number)  # a child is always younger than its parents
        front.remove(trial)
        found[trial.number] = trial
        front += [
            trials[n]
            for n in dict.fromkeys(trial.parents)
            if n in trials and n < trial.number and trials[n] not in front
        ]
    return tuple(ancestor(trial, trials) for trial in found.values())


def ancestor(trial: Trial, trials: dict[int, Trial]) -> Ancestor:
    """How `trial` was bred: its value, and its genes against the best of its parents in `trials`."""
    parents = [trials[n] for n in trial.parents if n in trials and trials[n].family == trial.family]
    changes = {}
    if parents:
        parent = min(parents, key=lambda p: p.value or math.inf)
        changes = {
            name: (parent.config.get(name), value)
            for name, value in trial.config.items()
            if parent.config.get(name) != value
        }
    return Ancestor(trial.number, trial.family, trial.state.value, trial.operator, trial.parents, trial.value, changes)
