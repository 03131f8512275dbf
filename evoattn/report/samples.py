"""The right trials of each family with their parameters, few enough to draw."""

from __future__ import annotations

from evoattn.model.records import Trial
from evoattn.model.space import Value
from evoattn.report.analysis import Results
from evoattn.report.parameters import FamilySample

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
