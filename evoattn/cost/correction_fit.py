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

from evoattn.cost.correction import MOST, NONE, Correction, terms
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


@dataclass(frozen=True)
class _Table:
    """A problem's rows as numbers. What is left over is so within the problem: means are taken off."""

    raw: Floats
    """[rows, names]: `terms`."""
    scores: Floats
    us: Floats
    products: Floats
    right: Floats

    def lost(self, factors: Floats | None) -> float:
        """Natural logarithm of what the first choice takes over the best; `factors`: of a correction."""
        own = 0.0 if factors is None else np.clip(self.raw @ factors, -MOST, MOST)
        return math.log(self.us[int(np.argmin(self.scores + own))] / self.us.min())


def fit(rows: Sequence[Timed]) -> Fit:
    """The correction that chooses best on problems left out."""
    by_problem = [list(found) for _, found in groupby(sorted(rows, key=lambda r: repr(r.problem)), lambda r: r.problem)]
    names, tables = _tables([found for found in by_problem if len(found) > 1])
    before = _mean([table.lost(None) for table in tables])
    if len(tables) < LEAST_PROBLEMS or sum(len(table.us) for table in tables) < LEAST_TIMES:
        return Fit(NONE, before, before)
    lost = {strength: _left_out(tables, strength) for strength in STRENGTHS}
    best = min(lost, key=lambda strength: lost[strength])
    if lost[best] >= before:
        return Fit(NONE, before, before)
    factors = {name: round(float(x), 5) for name, x in zip(names, _ridge(tables, best), strict=True) if abs(x) > 1e-4}
    return Fit(Correction(factors), before, lost[best])


def _mean(logs: Sequence[float]) -> float:
    """Geometric; 1 of none."""
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def _left_out(tables: Sequence[_Table], strength: float) -> float:
    logs = []
    for fold in range(FOLDS):
        factors = _ridge([table for i, table in enumerate(tables) if i % FOLDS != fold], strength)
        logs += [table.lost(factors) for table in tables[fold::FOLDS]]
    return _mean(logs)


def _tables(problems: Sequence[Sequence[Timed]]) -> tuple[list[str], list[_Table]]:
    """Names of all terms, and the tables. Times near a problem's best weigh more."""
    known = [[terms(r.config, r.parts) for r in rows] for rows in problems]
    names = sorted({name for rows in known for row in rows for name in row})
    place, tables = {name: i for i, name in enumerate(names)}, []
    for rows, found in zip(problems, known, strict=True):
        raw: Floats = np.zeros((len(rows), len(names)))
        for i, row in enumerate(found):
            raw[i, [place[name] for name in row]] = list(row.values())
        us, scores = np.array([r.us for r in rows]), np.log([r.score for r in rows])
        weights = FAR + np.exp(-(us / us.min() - 1) / FALL)
        weights /= weights.mean()
        over = np.log(us) - scores
        over -= np.average(over, weights=weights)
        within = raw - np.average(raw, axis=0, weights=weights)
        weighted = within * weights[:, None]
        tables.append(_Table(raw, scores, us, within.T @ weighted, weighted.T @ over))
    return names, tables


def _ridge(tables: Sequence[_Table], strength: float) -> Floats:
    """Of all terms the factors that explain most of what is left over."""
    products = sum((table.products for table in tables[1:]), tables[0].products)
    right = sum((table.right for table in tables[1:]), tables[0].right)
    found: Floats = np.asarray(np.linalg.solve(products + strength * np.eye(len(right)), right), np.float64)
    return found
