"""The fit of a card's correction: trees for what the cost model leaves over within each problem, then for each kernel
the means of what they leave over, on all problems and on a class of them. Whether these choose better than the model
without them is judged on problems left out, family by family; where not, nothing is corrected."""

import math
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.correction import ANYWHERE, DIGITS, MOST, NAME, Correction, class_of, row_of
from evoattn.cost.explanation import kinds
from evoattn.cost.fitted import Floats, Trees
from evoattn.cost.training.fit import LEAST_ROWS, fit_trees
from evoattn.model.problem import AttentionProblem

FOLDS = 4
LEAST_PROBLEMS = 12
"""Fewer problems make no correction."""
FAR, FALL = 0.3, 0.15
"""Weight of times far behind the best of their problem, and how soon they count as such (as of `cost fit`)."""
SIZE: dict[str, float] = {"max_iter": 300, "learning_rate": 0.05, "max_leaf_nodes": 31, "min_samples_leaf": 20,
                          "l2_regularization": 30.0, "max_bins": 96, "max_features": 0.3}  # fmt: skip
"""Arguments of scikit-learn's boosting."""
LATE, LEAST_TIMES, MOST_LATE = 0.6, 4, 2
"""Natural logarithm of a time over its score, less the median of its problem, from which on it is a launch's that the
CPU was late with, if the kernel's median is under half of that: of a kernel with so many times, so many at most. Of
39,489 times 25 are over twice their problem's best by that alone."""
SHRUNK_ANYWHERE, SHRUNK = 10.0, 5.0
"""Weight of times, of which each has FAR to FAR + 1, that a kernel's mean over all problems counts as if they had left
nothing over, and its mean over a class of them beside that. On 338 problems left out as an A100 first choices lose
1.045 without such means, 1.040 with those of classes alone, 1.037 with both, 1.038 with 5 and 5, 20 and 5, 10 and 8."""
UNKNOWN = "registers"
"""A feature that calibrations estimate, and that the compiler says where kernels are ranked after it."""
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Timed:
    """A measured time, what the model without a correction says, and what trees may ask."""

    problem: AttentionProblem
    family: str
    kernel: str
    """Which config, in a word."""
    us: float
    score: float
    asked: Mapping[str, float]


@dataclass(frozen=True)
class _Table:
    """All rows as numbers."""

    problem: Numbers
    """Of each row, from 0 on."""
    us: Floats
    scores: Floats
    """Logarithms."""
    over: Floats
    """Logarithm of a time over its score, less the mean of its problem."""
    weights: Floats
    families: Mapping[str, tuple[Numbers, tuple[str, ...], Floats]]
    """Of each its rows, the names of what they may be asked, and that."""
    kernel: Numbers
    """Of each row, a place in `kernels`."""
    kernels: Sequence[tuple[str, str]]
    """Classes of problems (`class_of`) and names of kernels."""
    anywhere: Numbers
    """Of each row, a place in `names`."""
    names: Sequence[str]
    """Of kernels, whatever the class."""

    def lost(self, logs: Floats) -> Floats:
        """Of each problem the natural logarithm of the first choice's time over the best. `logs`: of what each score
        is multiplied by."""
        order = np.lexsort((self.scores + logs, self.problem))
        groups = np.split(order, np.flatnonzero(np.diff(self.problem[order])) + 1) if len(order) else []
        return np.array([math.log(self.us[mine[0]] / self.us[mine].min()) for mine in groups])

    def means(self, logs: Floats, chosen: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """The mean of each of `names` of what is left over of its chosen rows beside `logs`, as for `lost`, and of each
        of `kernels` of what these leave; both drawn to 0."""
        found, weights = [], self.weights * chosen
        for place, count, shrunk in (
            (self.anywhere, len(self.names), SHRUNK_ANYWHERE),
            (self.kernel, len(self.kernels), SHRUNK),
        ):
            left = self.over - logs
            each = np.bincount(self.problem, left * self.weights) / np.bincount(self.problem, self.weights)
            sums = np.bincount(place, (left - each[self.problem]) * weights, count)
            found.append(sums / (np.bincount(place, weights, count) + shrunk))
            logs = logs + found[-1][place]
        anywhere, own = found
        return anywhere, own


_HERE: list[tuple[_Table, Mapping[str, float]]] = []
"""Of a process that fits, which is forked: the table need not be sent there."""


def fit(rows: Sequence[Timed], jobs: int | None = None, size: Mapping[str, float] = SIZE) -> Correction:
    """The correction, without trees where they do not choose better on problems left out, by `jobs` processes, all
    cores unless given. `size`: as SIZE."""
    table, kinds_of = _table(rows)
    before = table.lost(np.zeros(len(table.us)))
    if len(kinds_of) < LEAST_PROBLEMS or all(len(mine) < LEAST_ROWS for mine, *_ in table.families.values()):
        return Correction({}, _by_kind(kinds_of, before, before))
    _HERE[:] = [(table, size)]
    asked = [(fold, family) for family in table.families for fold in (None, *range(FOLDS))]
    jobs = min(jobs or os.cpu_count() or 1, len(asked))
    try:
        if jobs == 1:
            found = list(map(_fit_here, asked))
        else:
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
                found = list(pool.map(_fit_here, asked))
    finally:
        _HERE.clear()
    whole, *left_out = (
        {family: trees for (one, family), trees in zip(asked, found, strict=True) if one == fold and trees}
        for fold in (None, *range(FOLDS))
    )
    logs = np.zeros(len(table.us))
    for fold, trees in enumerate(left_out):
        logs += np.where(table.problem % FOLDS == fold, _logs(table, trees), 0.0)
    chosen, after, kept = np.zeros(len(logs)), before, dict[str, dict[str, Any]]()
    for family in sorted(whole, key=lambda name: -len(table.families[name][0])):
        mine, *_ = table.families[family]
        tried = chosen.copy()
        tried[mine] = logs[mine]
        if (lost := table.lost(tried)).sum() < after.sum():
            chosen, after, kept[family] = tried, lost, row_of(whole[family])
    left = np.zeros(len(logs))
    for fold in range(FOLDS):
        inside = table.problem % FOLDS == fold
        anywhere, own = table.means(chosen, ~inside)
        left += np.where(inside, anywhere[table.anywhere] + own[table.kernel], 0.0)
    anywhere, own = table.means(chosen, np.ones(len(chosen), np.bool_))
    kernels = dict[str, dict[str, float]]()
    for mine, *_ in table.families.values():
        tried = chosen.copy()
        tried[mine] += left[mine]
        if (lost := table.lost(tried)).sum() < after.sum():
            chosen, after = tried, lost
            for row in mine:
                (kind, name), mean = table.kernels[table.kernel[row]], float(anywhere[table.anywhere[row]])
                kernels.setdefault(ANYWHERE, {})[name] = round(mean, DIGITS)
                kernels.setdefault(kind, {})[name] = round(mean + float(own[table.kernel[row]]), DIGITS)
    return Correction(kept, _by_kind(kinds_of, before, after), kernels)


def _by_kind(kinds_of: Sequence[Sequence[str]], before: Floats, after: Floats) -> dict[str, tuple[float, ...]]:
    """As `Correction.left_out`."""
    found = {}
    for kind in dict.fromkeys(name for names in kinds_of for name in names):
        mine = [i for i, names in enumerate(kinds_of) if kind in names]
        found[kind] = (len(mine), *(round(math.exp(lost[mine].mean()), 4) for lost in (before, after)))
    return found


def _fit_here(asked: tuple[int | None, str]) -> Trees | None:
    """Trees of a family, of all problems but those of a fold; None where too few times are left."""
    from threadpoolctl import threadpool_limits

    ((table, size),), (fold, family) = _HERE, asked
    mine, names, columns = table.families[family]
    inside = table.problem[mine] % FOLDS != fold if fold is not None else np.ones(len(mine), np.bool_)
    if inside.sum() < LEAST_ROWS:
        return None
    chosen = mine[inside]
    with threadpool_limits(1):
        return fit_trees(names, columns[inside], table.over[chosen], table.weights[chosen], size)


def _logs(table: _Table, trees: Mapping[str, Trees]) -> Floats:
    """Of what the trees multiply each row's score by."""
    logs = np.zeros(len(table.us))
    for family, own in trees.items():
        mine, names, asked = table.families[family]
        columns = asked[:, [names.index(name) for name in own.names]]
        logs[mine] = np.clip(own.predict(columns), -MOST, MOST)
    return logs


def without_late(rows: Sequence[Timed]) -> list[Timed]:
    """The rows but those of late launches."""
    logs = [math.log(row.us / row.score) for row in rows]
    problems, kernels = defaultdict(list), defaultdict(list)
    for row, log in zip(rows, logs, strict=True):
        problems[row.problem].append(log)
    usual = {problem: median(found) for problem, found in problems.items()}
    over = [log - usual[row.problem] for row, log in zip(rows, logs, strict=True)]
    for row, log in zip(rows, over, strict=True):
        kernels[row.kernel].append(log)
    suspect = {
        kernel
        for kernel, found in kernels.items()
        if len(found) >= LEAST_TIMES and median(found) < LATE / 2 and sum(log > LATE for log in found) <= MOST_LATE
    }
    return [row for row, log in zip(rows, over, strict=True) if log <= LATE or row.kernel not in suspect]


def _table(rows: Sequence[Timed]) -> tuple[_Table, list[tuple[str, ...]]]:
    """The rows of problems with two kernels and more, and of each problem its kinds. Times near a problem's best weigh
    more."""
    by_problem: dict[AttentionProblem, list[Timed]] = {}
    for row in without_late(rows):
        by_problem.setdefault(row.problem, []).append(row)
    groups = [found for _, found in sorted(by_problem.items(), key=lambda item: repr(item[0])) if len(found) > 1]
    kept = [row for group in groups for row in group]
    number = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    us, scores = np.array([row.us for row in kept]), np.log([row.score for row in kept])
    best = np.array([min(row.us for row in group) for group in groups])
    weights = FAR + np.exp(-(us / best[number] - 1) / FALL)
    over = np.log(us) - scores
    over -= (np.bincount(number, over * weights) / np.bincount(number, weights))[number]
    families = {}
    for family in sorted({row.family for row in kept}):
        mine = np.flatnonzero([row.family == family for row in kept])
        names = tuple(sorted({name for i in mine for name in kept[i].asked} - {UNKNOWN}))
        asked = np.array([[kept[i].asked.get(name, math.nan) for name in names] for i in mine])
        families[family] = mine, names, asked
    fastest = [min(group, key=lambda row: row.us) for group in groups]
    kinds_of = [("all", row.family, *kinds(row.problem)) for row in fastest]
    named = [(class_of(row.problem), row.kernel[:NAME]) for row in kept]
    place = {name: i for i, name in enumerate(dict.fromkeys(named))}
    kernel, kernels = np.array([place[name] for name in named], np.int64), list(place)
    alone = {name: i for i, name in enumerate(dict.fromkeys(name for _, name in kernels))}
    anywhere = np.array([alone[name] for _, name in named], np.int64)
    return _Table(number, us, scores, over, weights, families, kernel, kernels, anywhere, list(alone)), kinds_of
