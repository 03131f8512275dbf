"""How well predicted times order kernels: the numbers of reports/cost_model.md."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evoattn.cost.explanation import ANY_CARD, kinds
from evoattn.cost.training.rows import Row, alike
from evoattn.families import registry

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

    def rounded(self) -> dict[str, float]:
        """What a file keeps."""
        return {name: round(value, 4) for name, value in vars(self).items()}

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


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float:
    """Spearman's, of two lists of numbers."""
    from scipy.stats import spearmanr

    return float(spearmanr(one, other)[0])


def judge(predicted: ArrayLike, measured: ArrayLike, problems: Sequence[Hashable]) -> Judgement:
    """Of kernels of several problems, each with at least `LEAST` of them."""
    judged = [np.array(group) for group in alike(problems) if len(group) >= LEAST]
    all_p, all_m = np.asarray(predicted), np.asarray(measured)
    correlations, tenths, firsts, eights = [], [], [], []
    for group in judged:
        p, m = all_p[group], all_m[group]
        order = np.argsort(m)
        correlations.append(rank_correlation(p, m))
        tenth = order[: max(10, len(group) // 10)]
        if m[tenth].max() > NOISE * m[tenth].min():
            tenths.append(rank_correlation(p[tenth], m[tenth]))
        firsts.append(m[np.argmin(p)] / m.min())
        eights.append(m[np.argsort(p)[:8]].min() / m.min())

    def mean(factors: list[float]) -> float:
        return math.exp(float(np.log(factors).mean()))

    return Judgement(
        len(judged), sum(map(len, judged)), float(np.median(correlations)), float(min(correlations)),
        float(np.median(tenths)), mean(firsts), float(max(firsts)), float(np.quantile(firsts, 0.95)), mean(eights),
        float(max(eights)),
    )  # fmt: skip


HOPPER_ONLY = ("wgmma", "tma", "cluster")


def for_all_cards(row: Row) -> bool:
    """Whether a card without wgmma, tensor copies and clusters has this config too."""
    values = {str(v) for v in row.config.params.values()}
    return "sm_90a" not in registry.lookup(row.family).devices and not values & set(HOPPER_ONLY)


def problem_keys(rows: Sequence[Row]) -> list[Hashable]:
    """What tells the problems of rows apart that are ranked by themselves."""
    return [(row.gpu.name, row.problem, row.source) for row in rows]


def judged_sets(rows: Sequence[Row], score: NDArray[np.float64]) -> dict[str, Judgement]:
    """The judgement of each set that has a problem with enough kernels, by what it is called: all, each card and
    source, the families of any card alone, each kind of problem, each family."""
    sets: list[tuple[str, list[int]]] = [("all", list(range(len(rows))))]
    for source in sorted({row.source for row in rows}):
        for card in sorted({row.gpu.name for row in rows}):
            here = [i for i, row in enumerate(rows) if row.source == source and row.gpu.name == card]
            sets += [(f"{source}, {card}", here)]
            sets += [(f"{source}, {card}{ANY_CARD}", [i for i in here if for_all_cards(rows[i])])]
    of_kind: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        for kind in kinds(row.problem):
            of_kind[kind].append(i)
    sets += sorted(of_kind.items())
    for family in sorted({row.family for row in rows}):
        sets.append((family, [i for i, row in enumerate(rows) if row.family == family]))
    judged = {}
    for label, chosen in sets:
        keys = problem_keys([rows[i] for i in chosen])
        if max(Counter(keys).values(), default=0) >= LEAST:
            judged[label] = judge(score[chosen], [rows[i].us for i in chosen], keys)
    return judged
