"""What was won, and by which parameters: the improvements of a study in order, and what each value of a parameter was
worth."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median
from typing import NamedTuple

from evoattn.model.records import Trial
from evoattn.model.space import Value
from evoattn.report.analysis import Results, ancestor
from evoattn.report.parameters import GeneValue
from evoattn.report.rows import Improvement, Progress

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
