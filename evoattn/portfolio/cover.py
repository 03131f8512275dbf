"""Few kernels that serve a class well: a choice one by one so that the rule loses least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
"""[problems, kernels] in µs; NaN where a kernel cannot serve a problem."""

MOST_KERNELS = 8
WORST_SHARE, WORST_TENTH = 0.15, 0.1
"""Of the objective: the mean over the worst tenth of the problems, beside the mean over all."""
GAIN = 0.0002
"""A kernel that lowers the objective by less is not worth its place."""
UNSERVED = 4.0
"""Regret of a problem that no chosen kernel serves."""


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


def judge(us: Times, predicted: Times, columns: Sequence[int]) -> Judged:
    """The rule with the kernels `columns` on every problem: of those that can serve it the one of the least predicted
    time."""
    known = _known(us, predicted)[:, list(columns)]
    chosen, rows = known.argmin(axis=1), np.arange(len(us))
    taken = us[:, list(columns)][rows, chosen]
    return Judged(np.where(np.isfinite(known[rows, chosen]), taken / np.nanmin(us, axis=1), UNSERVED))


def choose(
    us: Times,
    predicted: Times,
    units: Sequence[Sequence[int]],
    most: int = MOST_KERNELS,
    weights: Times | None = None,
) -> list[int]:
    """At most `most` of the `units` (columns of one compiled source each) to keep. `weights`: how much each problem
    counts, 1 unless given.

    Chosen one by one; after each, one whose place another would fill better makes way for it.
    """
    choice = _Choice(us, predicted, units, np.ones(len(us)) if weights is None else weights)
    chosen: list[int] = []
    least = math.inf
    while len(chosen) < most and (found := choice.best_with(chosen)):
        lost, unit = found
        if chosen and least - lost < GAIN:
            break
        chosen, least = [*chosen, unit], lost
        for place in range(len(chosen) - 1):
            rest = chosen[:place] + chosen[place + 1 :]
            other = choice.best_with(rest)
            if other and least - other[0] >= GAIN:
                chosen, least = [*rest, other[1]], other[0]
    return chosen


class _Choice:
    """What units predict and lose, a column for each."""

    def __init__(self, us: Times, predicted: Times, units: Sequence[Sequence[int]], weights: Times) -> None:
        known = _known(us, predicted)
        picked = np.stack([np.array(unit)[known[:, list(unit)].argmin(axis=1)] for unit in units], axis=1)
        self._predicted = np.take_along_axis(known, picked, axis=1)
        lost = np.log(np.take_along_axis(us, picked, axis=1) / np.nanmin(us, axis=1, keepdims=True))
        self._lost = np.where(np.isfinite(self._predicted), lost, math.log(UNSERVED))
        self._weights, self._rows = weights, np.arange(len(us))

    def best_with(self, kept: list[int]) -> tuple[float, int] | None:
        """(objective, unit) of the unit that beside the `kept` ones leaves least lost; None if all are kept."""
        others = [u for u in range(self._lost.shape[1]) if u not in kept]
        if not others:
            return None
        lost = self._lost[:, others]
        if kept:
            chosen = np.array(kept)[self._predicted[:, kept].argmin(axis=1)]
            faster = self._predicted[:, others] < self._predicted[self._rows, chosen][:, None]
            lost = np.where(faster, lost, self._lost[self._rows, chosen][:, None])
        objectives = self._objectives(lost)
        return float(objectives.min()), others[int(objectives.argmin())]

    def _objectives(self, lost: Times) -> Times:
        """[choices]: the objective of each choice, by what it loses [problems, choices]."""
        order = (-lost).argsort(axis=0)
        weights = self._weights[order]
        reached, total = weights.cumsum(axis=0), self._weights.sum()
        sums = (weights * np.take_along_axis(lost, order, axis=0)).cumsum(axis=0)
        ends = (reached < WORST_TENTH * total).sum(axis=0)[None]
        worst = np.take_along_axis(sums, ends, axis=0) / np.take_along_axis(reached, ends, axis=0)
        return np.asarray(sums[-1] / total + WORST_SHARE * worst[0])


def _known(us: Times, predicted: Times) -> Times:
    return np.where(np.isnan(us) | np.isnan(predicted), np.inf, predicted)
