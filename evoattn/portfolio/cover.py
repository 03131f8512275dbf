"""Few kernels that serve a class well: fitted constants for each, and a choice one by one so that the rule loses least.

Every judgement leaves the judged problem out of the fit of every kernel's constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
"""[problems, kernels] in µs; NaN where a kernel cannot serve a problem."""

MOST_KERNELS = 8
WORST_SHARE, WORST_TENTH = 0.15, 10
"""Of the objective: the mean over the worst tenth of the problems, beside the mean over all."""
GAIN = 0.0005
"""A kernel that lowers the objective by less is not worth its place."""
UNSERVED = 4.0
"""Regret of a problem that no chosen kernel serves."""


def fit(work: Times, us: Times) -> Times:
    """The non-negative constants of one kernel that make the relative errors of its times least. `work` [problems,
    terms], `us` [problems]."""
    from scipy.optimize import nnls  # only whoever builds a portfolio needs SciPy

    constants, _ = nnls(work / us[:, None], np.ones(len(us)))
    return np.asarray(constants)


def predictions_left_out(work: Sequence[Times], us: Times) -> Times:
    """[problems, kernels]: each time as predicted by constants fitted without that problem; NaN where too few were
    measured.
    `work[k]` [problems, terms] of kernel k."""
    predicted = np.full(us.shape, np.nan)
    for k in range(us.shape[1]):
        known = np.flatnonzero(~np.isnan(us[:, k]))
        if len(known) < 3:
            continue
        for i in known:
            others = known[known != i]
            predicted[i, k] = work[k][i] @ fit(work[k][others], us[others, k])
    return predicted


@dataclass(frozen=True)
class Judged:
    """Regrets (time over the best known, ≥ 1) of the rule's choices, by problem."""

    regrets: Times

    @property
    def geomean(self) -> float:
        return math.exp(float(np.log(self.regrets).mean()))

    @property
    def worst(self) -> float:
        return float(self.regrets.max())

    @property
    def objective(self) -> float:
        logs = np.sort(np.log(self.regrets))[::-1]
        return float(logs.mean() + WORST_SHARE * logs[: max(1, len(logs) // WORST_TENTH)].mean())


def judge(us: Times, predicted: Times, columns: Sequence[int]) -> Judged:
    """The rule with the kernels `columns` on every problem: it takes the one of the least predicted time."""
    known = np.where(np.isnan(us) | np.isnan(predicted), np.inf, predicted)[:, list(columns)]
    chosen = known.argmin(axis=1)
    taken = us[:, list(columns)][np.arange(len(us)), chosen]
    served = np.isfinite(known[np.arange(len(us)), chosen])
    return Judged(np.where(served, taken / np.nanmin(us, axis=1), UNSERVED))


def choose(us: Times, predicted: Times, sources: Sequence[str], most: int = MOST_KERNELS) -> tuple[list[int], Judged]:
    """Columns to keep, of at most `most` different `sources`, and how the rule does with them.

    Chosen one by one; after each, a column that another would fill better makes way for it.
    """
    chosen: list[int] = []
    best = Judged(np.full(len(us), UNSERVED))

    def allowed(columns: list[int]) -> list[int]:
        kept = {sources[c] for c in columns}
        return [k for k in range(len(sources)) if k not in columns and (len(kept) < most or sources[k] in kept)]

    def better(columns: list[int]) -> tuple[Judged, int] | None:
        tried = [(judge(us, predicted, [*columns, k]), k) for k in allowed(columns)]
        return min(tried, key=lambda pair: pair[0].objective) if tried else None

    while found := better(chosen):
        result, k = found
        if chosen and best.objective - result.objective < GAIN:
            break
        chosen, best = [*chosen, k], result
        for place in range(len(chosen) - 1):
            rest = chosen[:place] + chosen[place + 1 :]
            other = better(rest)
            if other and best.objective - other[0].objective >= GAIN:
                chosen, best = [*rest, other[1]], other[0]
    return chosen, best
