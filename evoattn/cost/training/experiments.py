"""Which fits are made, and on which measured times each is judged."""

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.cost.fitted import Fitted, load
from evoattn.cost.training import fit as fits
from evoattn.cost.training.judge import HEAD, Judgement, judged_sets
from evoattn.cost.training.rows import Row, alike, launched_as_today, name_of, named, read, thinned
from evoattn.cost.training.table import Floats, Numbers, Table, make_table
from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem

EACH = 40
"""Rows of a problem of a campaign in the fit, a third of them its fastest; of landscapes more."""
FOLDS = 3
AT_ONCE = FOLDS + 2
"""Fits that are made at once: of the folds, of the whole, of one card alone."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """Measured rows: those that are judged, with the compiler's registers, and those in the fit as they are there."""

    judged: Table
    fitted: Table

    def judge(self, keep: Callable[[Row], bool]) -> Numbers:
        """Which of the judged rows are kept."""
        return np.flatnonzero([keep(row) for row in self.judged.rows])

    def fit(self, keep: Callable[[Row], bool]) -> Numbers:
        """Which of the fitted rows are kept."""
        return np.flatnonzero([keep(row) for row in self.fitted.rows])


def make_fit(paths: Sequence[Path], say: Say, each: int = EACH, jobs: int = 1) -> Fitted:
    """The fit to the times of these files, judged on nothing."""
    thin = thinned(launched_as_today(read(paths)), each)
    say(f"{len(thin)} times in the fit")
    found = fits.fit(make_table(thin, "both", jobs), np.arange(len(thin)))
    return replace(found, about=_about(paths, thin, {}))


def fit_and_judge(
    paths: Sequence[Path],
    say: Say,
    keep: Callable[[Fitted], None] | None = None,
    each: int = EACH,
    judged: int | None = None,
    jobs: int = 1,
) -> None:
    """Judge fits to the times of these files on problems that they did not see, and say the tables.

    `each` and `judged`: rows of a problem of a campaign in the fit, and that are judged (None: all). With `keep` a fit
    to all is made too; it is given to `keep` when it is made, should the judging be cut off, and again with its
    judgement."""
    every = launched_as_today(read(paths))
    thin, rows = thinned(every, each), thinned(every, judged) if judged else every
    data = Data(make_table(rows, "compiler", jobs), make_table(thin, "both", jobs))
    say(f"{len(thin)} times in the fit, {len(rows)} judged")
    with _processes(data, jobs) as pool:
        whole = pool.submit(_fit_here, np.arange(len(thin))) if keep else None
        if whole and keep:
            whole.add_done_callback(lambda done: keep(replace(done.result(), about=_about(paths, thin, {}))))
        found = _judge_all(data, pool, say)
        if whole and keep:
            keep(replace(whole.result(), about=_about(paths, thin, found)))


def fit_again(say: Say, keep: Callable[[Fitted], None], each: int, judged: int | None, jobs: int) -> None:
    """The fit that ships, made again: of the files that its `about` names, then the trees of families that have later
    ones, then those of kernels near the best. `judged`: as for `fit_and_judge`; 0: on nothing. Raises `WrongUse` where
    the repository lacks a file."""
    about, stages = load().about, defaultdict[tuple[str, ...], list[str]](list)
    for family, told in about.get("families", {}).items():
        stages[tuple(told["files"])].append(family)
    paths, made = named(about["files"]), list[Fitted]()
    later = [(named(names), families) for names, families in stages.items()]
    if judged == 0:
        made.append(make_fit(paths, say, each, jobs))
    else:
        fit_and_judge(paths, say, made.append, each, judged, jobs)
    for files_of_stage, families in later:
        made.append(fit_families(files_of_stage, families, say, each, jobs, False, made[-1]))
    for told in about.get("near", []):
        made.append(fit_near(named(told["files"]), say, jobs, made[-1]))
    keep(made[-1])


def fit_families(
    paths: Sequence[Path],
    families: Sequence[str],
    say: Say,
    each: int,
    jobs: int,
    judged: bool = True,
    base: Fitted | None = None,
) -> Fitted:
    """Trees of these families alone, by the weights of `base`, the fit that ships unless given, which keeps all else;
    `judged` by fits that leave problems out. Raises `WrongUse` where the files have no times of them."""
    base = base or load()
    rows = [row for row in thinned(launched_as_today(read(paths)), each) if row.family in families]
    if missing := sorted(set(families) - {row.family for row in rows}):
        raise WrongUse(f"The files have no times of {missing[0]}.")
    table = make_table(rows, "both", jobs)
    weights = {**base.weights, **{family: base.weights_of(family) for family in families}}
    told: dict[str, Any] = {"files": [path.name for path in paths], "made": time.strftime("%Y-%m-%d")}
    if judged:
        data = Data(table, table)
        parts = [(outside, fits.fit(table, inside, weights)) for inside, outside in folds(data)]
        chosen = np.concatenate([outside for outside, _ in parts])
        score = np.concatenate([fits.predict(table, outside, found) for outside, found in parts])
        regrets = _first_choices([rows[i] for i in chosen], score)
        mean, worst = float(np.exp(np.log(regrets).mean())), float(regrets.max())
        say(f"Of {len(regrets)} problems left out first choices took {mean:.3f} times the best, {worst:.3f} at worst.")
        told |= {"left_out": {"problems": len(regrets), "mean": mean, "worst": worst}}
    found = fits.fit(table, np.arange(len(rows)), weights)
    counts = Counter(row.family for row in rows)
    later = {family: told | {"times": counts[family]} for family in families}
    about = {**base.about, "families": {**base.about.get("families", {}), **later}}
    return Fitted(weights, {**base.trees, **found.trees}, about)


def fit_near(paths: Sequence[Path], say: Say, jobs: int, base: Fitted | None = None) -> Fitted:
    """`base`, the fit that ships unless given, with more trees for how kernels near the best of a problem are ordered
    (`fit.fit_near`), judged by fits that leave problems of these files out. Raises `WrongUse` where it has seen one of
    the files."""
    base = base or load()
    stages = [base.about, *base.about.get("families", {}).values(), *base.about.get("near", [])]
    names = list(map(name_of, paths))
    if seen := sorted(set(names) & {name_of(Path(name)) for stage in stages for name in stage["files"]}):
        raise WrongUse(f"The fit has times of {seen[0]} already: what it leaves over there is less than elsewhere.")
    rows = launched_as_today(read(paths))
    table = make_table(rows, "estimate", jobs)
    everything, score = np.arange(len(rows)), np.zeros(len(rows))
    for inside, outside in folds(Data(table, table)):
        score[outside] = fits.predict(table, outside, fits.fit_near(table, inside, base))
    regrets = (_first_choices(rows, one) for one in (fits.predict(table, everything, base), score))
    before, after = (float(np.exp(np.log(one).mean())) for one in regrets)
    problems = len({(row.gpu.name, row.problem) for row in rows})
    say(f"Of {problems} problems left out first choices took {after:.3f} times the best, {before:.3f} before.")
    told = {"files": names, "made": time.strftime("%Y-%m-%d"), "times": len(rows),
            "left_out": {"problems": problems, "before": before, "mean": after}}  # fmt: skip
    about = {**base.about, "near": [*base.about.get("near", []), told]}
    return replace(fits.fit_near(table, everything, base), about=about)


def _first_choices(rows: Sequence[Row], score: Floats) -> Floats:
    """Of each problem the time of the kernel with the least score over the least time."""
    groups = alike((row.gpu.name, row.problem) for row in rows)
    firsts = (rows[min(group, key=lambda i: score[i])].us for group in groups)
    return np.array([us / min(rows[i].us for i in group) for us, group in zip(firsts, groups, strict=True)])


def _about(paths: Sequence[Path], rows: Sequence[Row], judged: dict[str, Judgement]) -> dict[str, Any]:
    """What the fit's file says about it."""
    return {
        "files": [path.name for path in paths], "times": len(rows), "cards": sorted({row.gpu.name for row in rows}),
        "made": time.strftime("%Y-%m-%d"), "left_out": {label: one.rounded() for label, one in judged.items()},
    }  # fmt: skip


_HERE: list[tuple[Data, int]] = []
"""Of a process that fits: the data, and the threads of a fit."""


@contextmanager
def _processes(data: Data, jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that have the data: they are forked, so that it need not be sent there."""
    _HERE[:] = [(data, max(1, jobs // AT_ONCE))]
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            yield pool
    finally:
        _HERE.clear()


def _fit_here(inside: Numbers) -> Fitted:
    """A fit to these rows of the process's data."""
    from threadpoolctl import threadpool_limits

    ((data, threads),) = _HERE
    with threadpool_limits(threads):
        return fits.fit(data.fitted, inside)


def _judge_here(inside: Numbers, outside: Numbers) -> Floats:
    """The scores of the rows outside by a fit to those inside."""
    return fits.predict(_HERE[0][0].judged, outside, _fit_here(inside))


def _judge_all(data: Data, pool: ProcessPoolExecutor, say: Say) -> dict[str, Judgement]:
    """Say the tables; the judgement of problems left out."""
    parts = folds(data)
    scores = [pool.submit(_judge_here, *part) for part in parts]
    first = min(row.gpu.name for row in data.judged.rows)
    others = data.judge(lambda row: row.gpu.name != first)
    elsewhere = pool.submit(_judge_here, data.fit(lambda row: row.gpu.name == first), others) if len(others) else None
    chosen = np.concatenate([outside for _, outside in parts])
    score = np.concatenate([one.result() for one in scores])
    rows = [data.judged.rows[i] for i in chosen]
    judged = _report("Problems left out of the fit", rows, score, say)
    if elsewhere:
        _report(f"Fitted on the {first} alone", [data.judged.rows[i] for i in others], elsewhere.result(), say)
    return judged


def _report(title: str, rows: Sequence[Row], score: Floats, say: Say) -> dict[str, Judgement]:
    """Say the table of these scores."""
    found = judged_sets(rows, score)
    say("\n".join([f"{title}:", HEAD if found else "none", *(one.line(label) for label, one in found.items())]))
    return found


def folds(data: Data, count: int = FOLDS) -> list[tuple[Numbers, Numbers]]:
    """(rows in the fit, rows judged by it), so that no fit saw a time of its judged problems on any card."""
    problems = sorted({row.problem for row in data.judged.rows}, key=lambda p: p.describe())
    np.random.default_rng(0).shuffle(problems)
    return [_without(data, set(problems[first::count])) for first in range(count)]


def _without(data: Data, problems: set[AttentionProblem]) -> tuple[Numbers, Numbers]:
    return data.fit(lambda row: row.problem not in problems), data.judge(lambda row: row.problem in problems)
