"""What the trials of a study say together: its course, lineage and failures, and what parameters make of the time."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from evoattn.model.records import Study, Trial, TrialState
from evoattn.model.space import Value
from evoattn.report.data import (
    Ancestor,
    CostModelRank,
    FailureGroup,
    FamilySample,
    GeneValue,
    Importance,
    Improvement,
    Progress,
)
from evoattn.storage.course import Tried

MIN_TRIALS_TO_CORRELATE = 10
MAX_ANCESTORS = 24
MAX_REASON = 240


Result = tuple[Trial | Tried, float]
"""A right trial with its time in µs, or its relative cost."""
Results = dict[str, list[Result]]
"""By family: its right trials with their times in µs, or their relative costs, best first."""


def value_in(study: Study, trial: Trial | Tried) -> float | None:
    """The trial's value if it is of the study's kind: a measured study ranks no estimates."""
    return trial.value if (trial.state is TrialState.ESTIMATED) == study.offline else None


def right_trials(study: Study, trials: Iterable[Trial | Tried]) -> list[Result]:
    """The right trials with their values, in the order given."""
    return [(trial, value) for trial in trials if (value := value_in(study, trial)) is not None]


def by_family(right: Iterable[Result]) -> Results:
    """Families without a right trial are left out."""
    found: Results = {}
    for result in right:
        found.setdefault(result[0].family, []).append(result)
    return {family: sorted(pairs, key=itemgetter(1)) for family, pairs in found.items()}


def _time(text: str) -> float | None:
    """Seconds; None for what is no date."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def progress(study: Study, right: Iterable[Result]) -> Progress:
    """The right candidates, which are given in the order tried."""
    course = Progress("relative_cost" if study.offline else "median_us", [], [], [], [], [])
    best, start = float("inf"), _time(study.created_at)
    for trial, value in right:
        if value < best:
            best = value
            course.improvements.append(len(course.value))
        course.trial.append(trial.number)
        now = _time(trial.created_at)
        course.elapsed_s.append(max(0.0, now - start) if now is not None and start is not None else 0.0)
        course.family.append(trial.family)
        course.value.append(value)
    return course


def group_failures(failures: Iterable[tuple[TrialState, str, int]]) -> tuple[FailureGroup, ...]:
    """Failures by state and reason, most frequent first; reasons that differ only in numbers are one group.

    Only the first line of a reason is kept, and of a long one its beginning."""
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


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def rank_cost_model(trials: Iterable[Trial | Tried]) -> CostModelRank | None:
    """Spearman's correlation (Pearson's over ranks) of `relative_cost` with the median over `COMPLETE` trials; None
    below 10 of them."""
    right = ((t.relative_cost or 0.0, t.value) for t in trials if t.state is TrialState.COMPLETE)
    pairs = np.array([pair for pair in right if pair[1] is not None and 0 < pair[0] < math.inf])
    if len(pairs) < MIN_TRIALS_TO_CORRELATE:
        return None
    cost, time = map(_ranks, pairs.T)
    if cost.std() == 0 or time.std() == 0:
        return None
    return CostModelRank(float(np.corrcoef(cost, time)[0, 1]), len(pairs))


def lineage(best: Trial | None, trials: dict[int, Tried]) -> tuple[Ancestor, ...]:
    """`best` and its ancestors, youngest first, at most `MAX_ANCESTORS`; parents that are not in the study are passed
    over."""
    found: dict[int, Trial | Tried] = {}
    front: list[Trial | Tried] = [best] if best else []
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


def ancestor(trial: Trial | Tried, trials: dict[int, Tried]) -> Ancestor:
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


MIN_TRIALS = 30
"""Below it the best tenth is fewer than three trials, and says nothing about parameters."""
BEST_SHARE = 0.1


def importance_of(family: str, values: Sequence[float], columns: dict[str, Column]) -> Importance:
    """`values` (least first) and the parameters' columns are those of the right trials of one family.

    PED-ANOVA (Watanabe et al., IJCAI 2023) asks which parameters set the best tenth apart from all: what a search
    wants to know, in milliseconds, where fANOVA's forests take seconds and answer for the bad regions too."""
    count = len(values)
    if count < MIN_TRIALS:
        return Importance(family, count, {}, f"{count} right trials are too few to tell; {MIN_TRIALS} are needed.")
    varied = {name: column for name, column in columns.items() if len(column.values) > 1 and column.codes.min() >= 0}
    if not varied or values[0] == values[-1]:
        return Importance(family, count, {}, "All right trials have the same parameters or the same result.")
    best = bisect_right(values, values[math.ceil(BEST_SHARE * count) - 1])
    return Importance(family, count, _ped_anova(varied, best), "")


def _ped_anova(columns: dict[str, Column], best: int) -> dict[str, float]:
    """Shares by parameter, largest first: the Pearson divergence of its distribution among the `best` first trials from
    that among all.

    What `optuna.importance.PedAnovaImportanceEvaluator` computes for categorical parameters, to the last digit (tests
    hold the two together); that module alone takes a second to import, through scikit-learn, and then two for a day's
    trials."""
    divergences = {}
    for name, (values, drawn) in columns.items():
        top, everywhere = (_smoothed(np.bincount(part, minlength=len(values))) for part in (drawn[:best], drawn))
        divergences[name] = float(everywhere @ (top / everywhere - 1) ** 2)
    total = sum(divergences.values()) or 1.0
    return {name: value / total for name, value in sorted(divergences.items(), key=lambda item: -item[1])}


def _smoothed(counts: np.ndarray) -> np.ndarray:
    """The probability of each choice by a Parzen estimate: one kernel for every choice seen, in proportion to its
    count, which keeps a share for the other choices, and a uniform prior of weight 1."""
    seen = np.flatnonzero(counts)
    kernels = np.full((len(seen) + 1, len(counts)), 1 / (len(seen) + 1))
    kernels[np.arange(len(seen)), seen] += 1
    weights = np.append(counts[seen], 1)
    smoothed: np.ndarray = weights / weights.sum() @ (kernels / kernels.sum(axis=1, keepdims=True)) + 1e-12
    return smoothed


MIN_PAIRS = 3
TOP_SHARE = 0.05
MIN_BEST = 5
"""Trials among the best twentieth from which a value's share of them says something."""
MIN_EFFECT = 0.02
"""Of a paired effect from 1: a smaller one is within the noise of times that were taken alone."""
MIN_DIFFERENCE = 0.2
"""Of the share among the best from that among all."""


def improvements(progress: Progress, trials: dict[int, Tried]) -> tuple[Improvement, ...]:
    """Each new best in the order found, with its gain over the best before it and its genes against its best parent."""
    found = []
    before: float | None = None
    for index in progress.improvements:
        value = progress.value[index]
        gain = None if before is None else 1 - value / before
        found.append(Improvement(progress.elapsed_s[index], gain, ancestor(trials[progress.trial[index]], trials)))
        before = value
    return tuple(found)


def gene_values(results: Results, columns: dict[str, dict[str, Column]]) -> tuple[GeneValue, ...]:
    """Each value of each parameter: how often it was tried, its best and median time, its share among the best, its
    paired effect.

    The effect is the median, over pairs of trials that differ in this parameter alone, of the time with the value over
    the best time with any other value; None below `MIN_PAIRS` pairs. Parameters with one value are left out."""
    return tuple(row for family, found in results.items() for row in _family_values(family, found, columns[family]))


class Column(NamedTuple):
    """One parameter over many trials."""

    values: list[Value]
    """In the order in which they come first."""
    codes: np.ndarray
    """By trial, the index in `values`; -1 where the trial lacks the parameter."""


def columns_of(trials: Sequence[Trial | Tried]) -> dict[str, Column]:
    """Of each parameter that a config of the trials has."""
    by_number = np.argsort(np.fromiter((trial.number for trial in trials), np.int64, len(trials)))
    configs = [trials[place].config for place in by_number.tolist()]  # as they lie in memory: a third of the time
    of_shape: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, shape in enumerate(map(tuple, configs)):
        of_shape[shape].append(place)
    codes = {name: np.full(len(trials), -1, np.int32) for name in dict.fromkeys(chain.from_iterable(of_shape))}
    found: dict[str, defaultdict[Value, int]] = {name: defaultdict() for name in codes}
    for seen in found.values():
        seen.default_factory = seen.__len__
    for shape, places in of_shape.items():
        values = list(chain.from_iterable(map(dict.values, map(configs.__getitem__, places))))
        for n, name in enumerate(shape):
            of_name = map(found[name].__getitem__, values[n :: len(shape)])
            codes[name][by_number[places]] = np.fromiter(of_name, np.int32, len(places))
    return {name: _as_they_come(list(found[name]), codes[name]) for name in codes}


def _as_they_come(values: Sequence[Value], codes: np.ndarray) -> Column:
    """The column of these codes, with its values in the order in which they come first."""
    seen, first = np.unique(codes, return_index=True)
    old = seen[np.argsort(first)]
    old = old[old >= 0]
    new = np.full(len(values) + 1, -1, np.int32)  # the last is of the code -1
    new[old] = np.arange(len(old))
    return Column([values[code] for code in old], new[codes])


def _family_values(
    family: str, found: list[tuple[Trial | Tried, float]], columns: dict[str, Column]
) -> list[GeneValue]:
    times = np.array([value for _, value in found])
    rng = np.random.default_rng(1)
    hashes = {name: _hashes(column, rng) for name, column in columns.items()}
    whole = sum(hashes.values(), np.zeros(len(found), np.uint64))
    first = np.sort(np.unique(whole, return_index=True)[1])  # of each config the trial with its best time
    best_count = max(1, round(TOP_SHARE * len(found)))
    rows = []
    for name, (values, codes) in columns.items():
        if len(values) < 2:
            continue
        best = np.bincount(codes[:best_count][codes[:best_count] >= 0], minlength=len(values))
        having = first[codes[first] >= 0]
        ratios = _effects(whole[having] - hashes[name][having], times[having])
        for code in sorted(range(len(values)), key=lambda code: -best[code]):
            with_value = times[codes == code]
            paired = ratios[codes[having] == code]
            paired = paired[~np.isnan(paired)]
            top_share, share = float(best[code]) / best_count, len(with_value) / len(found)
            effect = float(np.median(paired)) if len(paired) >= MIN_PAIRS else None
            rows.append(
                GeneValue(
                    family=family,
                    gene=name,
                    value=values[code],
                    trials=len(with_value),
                    best=float(with_value[0]),
                    median=float(np.median(with_value)),
                    top_share=top_share,
                    share=share,
                    effect=effect,
                    pairs=len(paired),
                    tells=(effect is not None and abs(effect - 1) >= MIN_EFFECT)
                    or (best_count >= MIN_BEST and abs(top_share - share) >= MIN_DIFFERENCE),
                )
            )
    return rows


def _hashes(column: Column, rng: np.random.Generator) -> np.ndarray:
    """By trial, a number of 64 bits that stands for the parameter's value; 0 where the trial lacks it. Their sum stands
    for a config."""
    drawn = rng.integers(1, 1 << 63, len(column.values) + 1, dtype=np.uint64)
    drawn[-1] = 0
    numbers: np.ndarray = drawn[column.codes]
    return numbers


def _effects(backgrounds: np.ndarray, times: np.ndarray) -> np.ndarray:
    """By trial, best first and each config once: its time over the best other one of the same background; NaN where
    there is none."""
    order = np.argsort(backgrounds, kind="stable")
    begins = np.append(True, np.diff(backgrounds[order]) != 0)
    starts = np.flatnonzero(begins)
    group = np.empty(len(times), np.int64)
    group[order] = np.cumsum(begins) - 1
    alone = np.diff(starts, append=len(times))[group] < 2
    is_first = np.zeros(len(times), bool)
    is_first[order[starts]] = True
    others = order[np.minimum(starts[group] + is_first, len(times) - 1)]
    ratios: np.ndarray = np.where(alone, np.nan, times / times[others])
    return ratios


MAX_DRAWN = 400
"""Trials per family: more lines only cover each other, and the page is to stay small."""


def family_samples(results: Results) -> tuple[FamilySample, ...]:
    """Per family: its best `MAX_DRAWN` / 2 trials and an even sample of the others; all of them where they are
    fewer."""
    return tuple(_sample(family, found) for family, found in results.items())


def _sample(family: str, found: list[tuple[Trial | Tried, float]]) -> FamilySample:
    drawn = found
    if len(found) > MAX_DRAWN:
        half = MAX_DRAWN // 2
        rest = found[half:]
        drawn = found[:half] + rest[:: -(-len(rest) // half)]
    names = list(dict.fromkeys(name for trial, _ in drawn for name in trial.config))
    values = {name: in_order({t.config[name] for t, _ in drawn if name in t.config}) for name in names}
    index = {name: {value: n for n, value in enumerate(seen)} for name, seen in values.items()}
    return FamilySample(
        family=family,
        values=values,
        trial=[trial.number for trial, _ in drawn],
        value=[value for _, value in drawn],
        columns={n: [index[n][t.config[n]] if n in t.config else None for t, _ in drawn] for n in names},
    )


def in_order(values: set[Value]) -> tuple[Value, ...]:
    """Numbers by size, words by the alphabet, each kind together."""
    return tuple(sorted(values, key=lambda value: (isinstance(value, str), value)))
