"""What the trials of a study say together: its course, lineage and failures, and what parameters make of the time."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from evoattn.model.records import Study, Trial, TrialState, is_positive
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

MIN_TRIALS_TO_CORRELATE = 10
MAX_ANCESTORS = 24
MAX_REASON = 240


Results = dict[str, list[tuple[Trial, float]]]
"""By family: its right trials with their times in µs, or their relative costs, best first."""


def value_in(study: Study, trial: Trial) -> float | None:
    """The trial's value if it is of the study's kind: a measured study ranks no estimates."""
    return trial.value if (trial.state is TrialState.ESTIMATED) == study.offline else None


def right_trials(study: Study, trials: Iterable[Trial]) -> Results:
    """The right trials by family; families without one are left out."""
    found: Results = {}
    for trial in trials:
        if (value := value_in(study, trial)) is not None:
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
        value = value_in(study, trial)
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


MIN_TRIALS = 30
"""Below it the best tenth is fewer than three trials, and says nothing about parameters."""
BEST_SHARE = 0.1


def importance_of(family: str, results: list[tuple[dict[str, Any], float]]) -> Importance:
    """`results` are (parameters, value to minimise) of the right trials of one family.

    PED-ANOVA (Watanabe et al., IJCAI 2023) asks which parameters set the best tenth apart from all: what a search
    wants to know, in milliseconds, where fANOVA's forests take seconds and answer for the bad regions too.
    """
    if len(results) < MIN_TRIALS:
        return Importance(
            family, len(results), {}, f"{len(results)} right trials are too few to tell; {MIN_TRIALS} are needed."
        )
    names = [name for name in results[0][0] if all(name in params for params, _ in results)]
    seen = {name: sorted({params[name] for params, _ in results}, key=lambda v: (str(type(v)), v)) for name in names}
    varied = [name for name in names if len(seen[name]) > 1]
    if not varied or len({value for _, value in results}) == 1:
        return Importance(family, len(results), {}, "All right trials have the same parameters or the same result.")
    ranked = sorted(results, key=lambda result: result[1])
    cutoff = ranked[math.ceil(BEST_SHARE * len(ranked)) - 1][1]
    best = sum(value <= cutoff for _, value in ranked)
    shares = _ped_anova({name: seen[name] for name in varied}, [params for params, _ in ranked], best)
    return Importance(family, len(results), shares, "")


def _ped_anova(values: dict[str, list[Any]], ranked: list[dict[str, Any]], best: int) -> dict[str, float]:
    """Shares by parameter, largest first: the Pearson divergence of its distribution among the `best` first of
    `ranked` from that among all.

    What `optuna.importance.PedAnovaImportanceEvaluator` computes for categorical parameters, to the last digit (tests
    hold the two together); that module alone takes a second to import, through scikit-learn, and then two for a day's
    trials.
    """
    divergences = {}
    for name, choices in values.items():
        index = {choice: i for i, choice in enumerate(choices)}
        drawn = [index[params[name]] for params in ranked]
        top, everywhere = (_smoothed(np.bincount(part, minlength=len(choices))) for part in (drawn[:best], drawn))
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
MIN_DIFFERENCE = 0.2
"""Of the share among the best from that among all."""


def improvements(progress: Progress, trials: dict[int, Trial]) -> tuple[Improvement, ...]:
    """Each new best in the order found, with its gain over the best before it and its genes against its best parent."""
    found = []
    before: float | None = None
    for index in progress.improvements:
        value = progress.value[index]
        gain = None if before is None else 1 - value / before
        found.append(Improvement(progress.elapsed_s[index], gain, ancestor(trials[progress.trial[index]], trials)))
        before = value
    return tuple(found)


def gene_values(results: Results) -> tuple[GeneValue, ...]:
    """Each value of each parameter: how often it was tried, its best and median time, its share among the best, its
    paired effect.

    The effect is the median, over pairs of trials that differ in this parameter alone, of the time with the value over
    the best time with any other value; None below `MIN_PAIRS` pairs. Parameters with one value are left out.
    """
    return tuple(row for family, found in results.items() for row in _family_values(family, found))


def _family_values(family: str, found: list[tuple[Trial, float]]) -> list[GeneValue]:
    entries = [Entry(trial.config, value, sum(map(hash, trial.config.items()))) for trial, value in found]
    best_count = max(1, round(TOP_SHARE * len(entries)))
    rows = []
    for name in entries[0].config:
        having = [entry for entry in entries if name in entry.config]
        times: dict[Value, list[float]] = defaultdict(list)
        for entry in having:
            times[entry.config[name]].append(entry.time)
        if len(times) < 2:
            continue
        best = Counter(entry.config[name] for entry in entries[:best_count] if name in entry.config)
        effects = _effects(name, having)
        for gene in sorted(times, key=lambda value: -best[value]):
            ratios = effects[gene]
            top_share, share = best[gene] / best_count, len(times[gene]) / len(entries)
            effect = median(ratios) if len(ratios) >= MIN_PAIRS else None
            rows.append(
                GeneValue(
                    family=family,
                    gene=name,
                    value=gene,
                    trials=len(times[gene]),
                    best=times[gene][0],
                    median=median(times[gene]),
                    top_share=top_share,
                    share=share,
                    effect=effect,
                    pairs=len(ratios),
                    tells=effect is not None or (best_count >= MIN_BEST and abs(top_share - share) >= MIN_DIFFERENCE),
                )
            )
    return rows


class Entry(NamedTuple):
    """A right trial; `whole` is the sum of the hashes of its parameters."""

    config: dict[str, Value]
    time: float
    whole: int


def _effects(name: str, entries: list[Entry]) -> dict[Value, list[float]]:
    """Value → ratios to the best other value of the same background; `entries` best first, so that the first of each
    is its best.

    The sum of the hashes without this parameter's stands for the background, for speed.
    """
    backgrounds: dict[int, dict[Value, float]] = defaultdict(dict)
    for entry in entries:
        value = entry.config[name]
        backgrounds[entry.whole - hash((name, value))].setdefault(value, entry.time)
    ratios: dict[Value, list[float]] = defaultdict(list)
    for times in backgrounds.values():
        if len(times) > 1:
            for value, time in times.items():
                ratios[value].append(time / min(other for key, other in times.items() if key != value))
    return ratios


MAX_DRAWN = 400
"""Trials per family: more lines only cover each other, and the page is to stay small."""


def family_samples(results: Results) -> tuple[FamilySample, ...]:
    """Per family: its best `MAX_DRAWN` / 2 trials and an even sample of the others; all of them where they are
    fewer."""
    return tuple(_sample(family, found) for family, found in results.items())


def _sample(family: str, found: list[tuple[Trial, float]]) -> FamilySample:
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
