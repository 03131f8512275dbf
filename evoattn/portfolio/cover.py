"""Few kernels that serve a class well: chosen one by one so that the rule, asked about problems it has not seen, loses least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from evoattn.portfolio.rule import NEIGHBOURS, losses

MOST_KERNELS = 8
WORST_SHARE = 0.15
"""Of the objective: the mean over the worst tenth of the problems, beside the mean over all."""
GAIN = 0.001
"""A kernel that lowers the objective by less is not worth its place."""

Slowdowns = list[list[float | None]]


@dataclass(frozen=True)
class Judged:
    """Regrets (time over the best known, ≥ 1) of the rule's choice on each problem, that problem left out."""

    regrets: list[float]

    @property
    def geomean(self) -> float:
        return math.exp(fmean(math.log(r) for r in self.regrets))

    @property
    def worst(self) -> float:
        return max(self.regrets)

    @property
    def objective(self) -> float:
        logs = sorted((math.log(r) for r in self.regrets), reverse=True)
        return fmean(logs) + WORST_SHARE * fmean(logs[: max(1, len(logs) // 10)])


def judge(measured: Sequence[dict[str, float]], slowdowns: Slowdowns, neighbours: int = NEIGHBOURS) -> Judged:
    """The rule on every problem, that problem left out of what it knows. A problem that no kernel serves counts as 4."""
    regrets = []
    for i, row in enumerate(slowdowns):
        others = [j for j in range(len(slowdowns)) if j != i] or [i]
        expected = losses(measured[i], [measured[j] for j in others], [slowdowns[j] for j in others], neighbours)
        valid = [(loss, s) for loss, s in zip(expected, row, strict=True) if s is not None]
        regrets.append(min(valid, key=lambda pair: pair[0])[1] if valid else 4.0)
    return Judged(regrets)


def _columns(slowdowns: Slowdowns, chosen: Sequence[int]) -> Slowdowns:
    return [[row[k] for k in chosen] for row in slowdowns]


def choose(
    measured: Sequence[dict[str, float]], slowdowns: Slowdowns, sources: Sequence[str], most: int = MOST_KERNELS
) -> tuple[list[int], Judged]:
    """Columns of `slowdowns` to keep, of at most `most` different `sources`, and how the rule does with them.

    Chosen one by one; in between, a column whose place another would fill better makes way for it.
    """
    chosen: list[int] = []
    best = Judged([4.0] * len(slowdowns))

    def with_(columns: list[int]) -> Judged:
        return judge(measured, _columns(slowdowns, columns))

    def allowed(columns: list[int]) -> list[int]:
        kept = {sources[c] for c in columns}
        return [k for k in range(len(sources)) if k not in columns and (len(kept) < most or sources[k] in kept)]

    while options := allowed(chosen):
        result, k = min(((with_([*chosen, k]), k) for k in options), key=lambda pair: pair[0].objective)
        if chosen and best.objective - result.objective < GAIN:
            break
        chosen, best = [*chosen, k], result
        for place in range(len(chosen) - 1):
            rest = chosen[:place] + chosen[place + 1 :]
            other, k = min(((with_([*rest, k]), k) for k in allowed(rest)), key=lambda pair: pair[0].objective)
            if best.objective - other.objective >= GAIN:
                chosen, best = [*rest, k], other
    return chosen, best
