"""What the cost model's scores are multiplied by on a card that its owner has calibrated: factors of families, of parts
of the cost and of genes, fitted to times that were measured on it.

Only the order of kernels of one problem is corrected. The fit is a ridge regression of what the model leaves over,
within each problem; its strength is chosen on problems left out, and no correction is among the choices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.physics import Physics
from evoattn.model.calibrated import FILE, calibration_folder
from evoattn.model.gpu_spec import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, spelling

MOST = 1.0
"""Natural logarithm of a correction, at most."""
STRENGTHS = (3.0, 30.0, 300.0)
"""Of the ridge: the larger, the less is corrected."""
FOLDS = 4
LEAST_PROBLEMS, LEAST_TIMES = 12, 150
"""Fewer problems or times make no correction."""
FAR, FALL = 0.3, 0.15
"""Weight of times far behind the best of their problem, and how soon they count as such (as of `cost fit`)."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Correction:
    """Natural logarithms of factors by `name_of`; a part counts by its share of all."""

    factors: Mapping[str, float] = field(default_factory=dict)

    def log(self, config: KernelConfig, parts: Mapping[str, float]) -> float:
        """Of what a score is multiplied by."""
        if not self.factors:
            return 0.0
        found = sum(self.factors.get(name, 0.0) * value for name, value in terms(config, parts).items())
        return max(-MOST, min(MOST, found))

    def factor(self, config: KernelConfig, part: Physics) -> float:
        return math.exp(self.log(config, part.parts))


NONE = Correction()


def terms(config: KernelConfig, parts: Mapping[str, float]) -> dict[str, float]:
    """What is known of a kernel, by name: its family and genes, and each part's share."""
    whole = sum(parts.values()) or 1.0
    found = {f"part {name}": us / whole for name, us in parts.items()}
    found |= {f"{config.family} {name}={spelling(value)}": 1.0 for name, value in config.params.items()}
    return found | {config.family: 1.0}


_put: dict[GpuSpec, Correction] = {}


def put(gpu: GpuSpec, found: Correction) -> None:
    """Have this process, and those that it forks, take a correction that no file has yet."""
    _put[gpu] = found
    correction_of.cache_clear()


def forget() -> None:
    """Read the files anew."""
    _put.clear()
    correction_of.cache_clear()


@cache
def correction_of(gpu: GpuSpec) -> Correction:
    """What a calibration of the card found; none where there is none, or its file says something else."""
    if gpu in _put:
        return _put[gpu]
    try:
        row = json.loads((calibration_folder(gpu) / FILE).read_text(encoding="utf-8"))
        return of_row(row["correction"])
    except (OSError, ValueError, KeyError, TypeError):
        return NONE


def of_row(row: Any) -> Correction:
    """Of what a file says. Raises `ValueError` where that is no table of numbers."""
    if not isinstance(row, dict) or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in row.values()):
        raise ValueError("a correction is no table of numbers")
    return Correction(row)


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
