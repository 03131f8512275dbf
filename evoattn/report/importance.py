"""Which parameters matter, by PED-ANOVA over the trials of each family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from evoattn.report.parameters import Importance

MIN_TRIALS = 30
"""Below it the best tenth is fewer than three trials, and says nothing about parameters."""
BEST_SHARE = 0.1


def importance_of(family: str, results: list[tuple[dict[str, Any], float]]) -> Importance:
    """`results` are (parameters, value to minimise) of the right trials of one family.

    PED-ANOVA (Watanabe et al., IJCAI 2023) asks which parameters set the best tenth apart from all: what a search
    wants to know, in milliseconds, where fANOVA's forests take seconds and answer for the bad regions too.
    """
    if len(results) < MIN_TRIALS:
        return Importance(
            family, len(results), {}, f"{len(results)} right trials are too few to tell; {MIN_TRIALS} are needed."
        )
    names = [name for name in results[0][0] if all(name in params for params, _ in results)]
    seen = {name: sorted({params[name] for params, _ in results}, key=lambda v: (str(type(v)), v)) for name in names}
    varied = [name for name in names if len(seen[name]) > 1]
    if not varied or len({value for _, value in results}) == 1:
        return Importance(family, len(results), {}, "All right trials have the same parameters or the same result.")
    ranked = sorted(results, key=lambda result: result[1])
    cutoff = ranked[math.ceil(BEST_SHARE * len(ranked)) - 1][1]
    best = sum(value <= cutoff for _, value in ranked)
    shares = _ped_anova({name: seen[name] for name in varied}, [params for params, _ in ranked], best)
    return Importance(family, len(results), shares, "")


def _ped_anova(values: dict[str, list[Any]], ranked: list[dict[str, Any]], best: int) -> dict[str, float]:
    """Shares by parameter, largest first: the Pearson divergence of its distribution among the `best` first of
    `ranked` from that among all.

    What `optuna.importance.PedAnovaImportanceEvaluator` computes for categorical parameters, to the last digit (tests
    hold the two together); that module alone takes a second to import, through scikit-learn, and then two for a day's
    trials.
    """
    divergences = {}
    for name, choices in values.items():
        index = {choice: i for i, choice in enumerate(choices)}
        drawn = [index[params[name]] for params in ranked]
        top, everywhere = (_smoothed(np.bincount(part, minlength=len(choices))) for part in (drawn[:best], drawn))
        divergences[name] = float(everywhere @ (top / everywhere - 1) ** 2)
    total = sum(divergences.values()) or 1.0
    return {name: value / total for name, value in sorted(divergences.items(), key=lambda item: -item[1])}


def _smoothed(counts: np.ndarray) -> np.ndarray:
    """The probability of each choice by a Parzen estimate: one kernel for every choice seen, in proportion to its
    count, which keeps a share for the other choices, and a uniform prior of weight 1."""
    seen = np.flatnonzero(counts)
    kernels = np.full((len(seen) + 1, len(counts)), 1 / (len(seen) + 1))
    kernels[np.arange(len(seen)), seen] += 1
    weights = np.append(counts[seen], 1)
    smoothed: np.ndarray = weights / weights.sum() @ (kernels / kernels.sum(axis=1, keepdims=True)) + 1e-12
    return smoothed
