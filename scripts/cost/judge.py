"""How well predicted times order kernels: the numbers of docs/cost_model.md."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

LEAST = 20
"""Kernels of a problem below which it is not judged."""
NOISE = 1.02
"""Two kernels within this factor count as equally fast where the fastest tenth is ranked."""


@dataclass(frozen=True)
class Judgement:
    """Of one set of problems. Factors are measured times over the best measured one of the problem."""

    problems: int
    kernels: int
    spearman: float
    worst_spearman: float
    fastest_tenth: float
    """Median of Spearman's correlation among the fastest tenth (at least ten kernels)."""
    first: float
    """Of the kernel predicted fastest, geometric mean."""
    worst_first: float
    first_p95: float
    best_of_eight: float
    worst_of_eight: float

    def line(self, label: str) -> str:
        """One row of the table."""
        return (
            f"| {label} | {self.problems} | {self.kernels} | {self.spearman:.3f} | {self.worst_spearman:.2f} | "
            f"{self.fastest_tenth:.2f} | {self.first:.3f} | {self.first_p95:.2f} | {self.worst_first:.2f} | "
            f"{self.best_of_eight:.3f} | {self.worst_of_eight:.2f} |"
        )


HEAD = (
    "| judged on | problems | times | Spearman | worst | fastest tenth | first choice | 95 % | worst | best of 8 | "
    "worst |"
    "\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def judge(predicted: Sequence[float], measured: Sequence[float], problems: Sequence[Hashable]) -> Judgement:
    """Of kernels of several problems, each with at least `LEAST` of them."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, problem in enumerate(problems):
        groups[problem].append(i)
    judged = [np.array(g) for g in groups.values() if len(g) >= LEAST]
    all_p, all_m = np.asarray(predicted), np.asarray(measured)
    correlations, tenths, firsts, eights = [], [], [], []
    for group in judged:
        p, m = all_p[group], all_m[group]
        order = np.argsort(m)
        correlations.append(spearmanr(p, m)[0])
        tenth = order[: max(10, len(group) // 10)]
        if m[tenth].max() > NOISE * m[tenth].min():
            tenths.append(spearmanr(p[tenth], m[tenth])[0])
        firsts.append(m[np.argmin(p)] / m.min())
        eights.append(m[np.argsort(p)[:8]].min() / m.min())

    def mean(factors: list[float]) -> float:
        return math.exp(float(np.log(factors).mean()))

    return Judgement(
        len(judged), sum(map(len, judged)), float(np.median(correlations)), float(min(correlations)),
        float(np.median(tenths)), mean(firsts), float(max(firsts)), float(np.quantile(firsts, 0.95)), mean(eights),
        float(max(eights)),
    )  # fmt: skip
