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
PRIOR_TIMES = 0.03
"""See `fit`. With a fifth of the problems left out of everything, 0.03 and 0.3 lost equally on few queries, and 0.001,
0.03 and 0.3 on many."""
UNSERVED = 4.0
"""Regret of a problem that no chosen kernel serves."""


@dataclass(frozen=True)
class Usual:
    """What the constants of a family are on the whole: `constants`, and the part of a time that each term makes."""

    constants: Times
    shares: Times


def usual(work: Times, us: Times) -> Usual:
    """Of many kernels of one family together. `work` [times, terms], `us` [times]."""
    return Usual(fit(work, us), (work / us[:, None]).mean(axis=0))


def fit(work: Times, us: Times, prior: Usual | None = None) -> Times:
    """The non-negative constants that make the relative errors of the times least. `work` [times, terms], `us` [times].

    With a `prior`, a departure from the family's constants that changes a time by its whole counts as much as
    PRIOR_TIMES measured times that are wrong by their whole: what few times say nothing of is as is usual.
    """
    from scipy.optimize import nnls  # only whoever builds a portfolio needs SciPy

    rows, wanted = work / us[:, None], np.ones(len(us))
    if prior is not None:
        weight = math.sqrt(PRIOR_TIMES) * np.maximum(prior.shares, 1e-9)
        rows = np.vstack([rows, np.diag(weight)])
        wanted = np.concatenate([wanted, weight * prior.constants])
    return np.asarray(nnls(rows, wanted)[0])


def fit_source(work: Times, us: Times, prior: Usual, without: int = -1) -> Times:
    """The constants of one source out of the times of all its variants: `work` [variants, problems, terms], `us`
    [problems, variants]. Problem `without` is left out."""
    known = ~np.isnan(us)
    if without >= 0:
        known[without] = False
    problems, variants = np.nonzero(known)
    if not len(problems):
        return prior.constants
    return fit(work[variants, problems], us[problems, variants], prior)


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


def choices(us: Times, predicted: Times, columns: Sequence[int]) -> NDArray[np.int64]:
    """By problem, the place in `columns` of the kernel that the rule takes: of those that can serve it the one of the
    least predicted time."""
    return np.asarray(_known(us, predicted, columns).argmin(axis=1), dtype=np.int64)


def _known(us: Times, predicted: Times, columns: Sequence[int]) -> Times:
    return np.where(np.isnan(us) | np.isnan(predicted), np.inf, predicted)[:, list(columns)]


def judge(us: Times, predicted: Times, columns: Sequence[int]) -> Judged:
    """The rule with the kernels `columns` on every problem."""
    chosen, rows = choices(us, predicted, columns), np.arange(len(us))
    taken = us[:, list(columns)][rows, chosen]
    served = np.isfinite(_known(us, predicted, columns)[rows, chosen])
    return Judged(np.where(served, taken / np.nanmin(us, axis=1), UNSERVED))


def choose(
    us: Times, predicted: Times, units: Sequence[Sequence[int]], most: int = MOST_KERNELS
) -> tuple[list[int], Judged]:
    """At most `most` of the `units` (columns of one compiled source each) to keep, and how the rule does with them.

    Chosen one by one; after each, one whose place another would fill better makes way for it.
    """
    chosen: list[int] = []
    best = Judged(np.full(len(us), UNSERVED))

    def better(kept: list[int]) -> tuple[Judged, int] | None:
        columns = [c for u in kept for c in units[u]]
        tried = [(judge(us, predicted, [*columns, *units[u]]), u) for u in range(len(units)) if u not in kept]
        return min(tried, key=lambda pair: pair[0].objective) if tried else None

    while len(chosen) < most and (found := better(chosen)):
        result, unit = found
        if chosen and best.objective - result.objective < GAIN:
            break
        chosen, best = [*chosen, unit], result
        for place in range(len(chosen) - 1):
            rest = chosen[:place] + chosen[place + 1 :]
            other = better(rest)
            if other and best.objective - other[0].objective >= GAIN:
                chosen, best = [*rest, other[1]], other[0]
    return chosen, best
