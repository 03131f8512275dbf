"""The fit of a card's correction: a ridge regression of what the cost model leaves over, within each problem. Its
strength is chosen on problems left out, and no correction is among the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.correction import NONE, Correction, terms
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

STRENGTHS = (3.0, 30.0, 300.0)
"""Of the ridge: the larger, the less is corrected."""
FOLDS = 4
LEAST_PROBLEMS, LEAST_TIMES = 12, 150
"""Fewer problems or times make no correction."""
FAR, FALL = 0.3, 0.15
"""Weight of times far behind the best of their problem, and how soon they count as such (as of `cost fit`)."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """A measured time, and what the model without a correction says."""

    problem: AttentionProblem
    config: KernelConfig
    us: float
    score: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """A correction, and the time of the model's first choice over the best, geometric mean of problems left out:
    without it and with it."""

    correction: Correction
    before: float
    after: float


def fit(rows: Sequence[Timed]) -> Fit:
    """The correction that chooses best on problems left out."""
    by_problem = [list(found) for _, found in groupby(sorted(rows, key=lambda r: repr(r.problem)), lambda r: r.problem)]
    several = [found for found in by_problem if len(found) > 1]
    before = _lost(several, [NONE] * len(several))
    if len(several) < LEAST_PROBLEMS or sum(map(len, several)) < LEAST_TIMES:
        return Fit(NONE, before, before)
    lost = {strength: _left_out(several, strength) for strength in STRENGTHS}
    best = min(lost, key=lambda strength: lost[strength])
    if lost[best] >= before:
        return Fit(NONE, before, before)
    return Fit(_ridge(several, best), before, lost[best])


def _left_out(problems: Sequence[Sequence[Timed]], strength: float) -> float:
    corrections: list[Correction] = [NONE] * len(problems)
    for fold in range(FOLDS):
        found = _ridge([rows for i, rows in enumerate(problems) if i % FOLDS != fold], strength)
        for i in range(fold, len(problems), FOLDS):
            corrections[i] = found
    return _lost(problems, corrections)


def _lost(problems: Sequence[Sequence[Timed]], corrections: Sequence[Correction]) -> float:
    """What the first choices take over the best, geometric mean; 1 where there are no problems."""
    logs = [
        math.log(min(rows, key=lambda r: math.log(r.score) + one.log(r.config, r.parts)).us / min(r.us for r in rows))
        for rows, one in zip(problems, corrections, strict=True)
    ]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def _ridge(problems: Sequence[Sequence[Timed]], strength: float) -> Correction:
    """Of what is left over within each problem, times near its best weighing more."""
    tables = [[terms(r.config, r.parts) for r in rows] for rows in problems]
    names = sorted({name for rows in tables for row in rows for name in row})
    place = {name: i for i, name in enumerate(names)}
    products, right = np.zeros((len(names), len(names))), np.zeros(len(names))
    for rows, known in zip(problems, tables, strict=True):
        table: Floats = np.zeros((len(rows), len(names)))
        for i, row in enumerate(known):
            table[i, [place[name] for name in row]] = list(row.values())
        over = np.array([math.log(r.us / r.score) for r in rows])
        least = min(r.us for r in rows)
        weights = np.array([FAR + math.exp(-(r.us / least - 1) / FALL) for r in rows])
        weights /= weights.sum() / len(rows)
        table -= np.average(table, axis=0, weights=weights)
        over -= np.average(over, weights=weights)
        products += table.T @ (table * weights[:, None])
        right += table.T @ (over * weights)
    solved = np.linalg.solve(products + strength * np.eye(len(names)), right)
    return Correction({name: round(float(x), 5) for name, x in zip(names, solved, strict=True) if abs(x) > 1e-4})
