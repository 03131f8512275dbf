"""Which fits are made, and on which measured times each is judged."""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.cost.cost import Cost, cost
from evoattn.cost.fitted import Fitted, load
from evoattn.cost.training import fit as fits
from evoattn.cost.training.judge import (
    HEAD,
    LEAST,
    Judgement,
    for_all_cards,
    judged_sets,
    problem_keys,
    rank_correlation,
    spread_table,
)
from evoattn.cost.training.measured import campaign, files, is_landscape, read
from evoattn.cost.training.rows import Row, launched_as_today, thinned
from evoattn.cost.training.table import Floats, Numbers, Table, make_table
from evoattn.families import registry
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

EACH = 40
"""Rows of a problem of a campaign in the fit, a third of them its fastest; of landscapes more."""
FOLDS = 3
AT_ONCE = FOLDS + 3
"""Fits that are made at once: of the folds, of the whole, of one card alone, of campaigns alone."""
LEAST_TWICE = 12
"""Kernels of a problem that were timed twice, from which on its two orders are compared."""
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
    scores: Path | None = None,
) -> None:
    """Judge fits to the times of these files on problems that they did not see, and say the tables.

    `each` and `judged`: rows of a problem of a campaign in the fit, and that are judged (None: all). With `keep` a fit
    to all is made too; it is given to `keep` when it is made, should the judging be cut off, and again with its
    judgement. `scores`: where those of problems left out go, as columns of an .npz.
    """
    every = launched_as_today(read(paths))
    thin, rows = thinned(every, each), thinned(every, judged) if judged else every
    data = Data(make_table(rows, "compiler", jobs), make_table(thin, "both", jobs))
    say(f"{len(thin)} times in the fit, {len(rows)} judged")
    with _processes(data, jobs) as pool:
        whole = pool.submit(_fit_here, np.arange(len(thin))) if keep else None
        if whole and keep:
            whole.add_done_callback(lambda done: keep(replace(done.result(), about=_about(paths, thin, {}))))
        found = _judge_all(data, lambda *part: pool.submit(_judge_here, *part), say, scores)
        if whole and keep:
            keep(replace(whole.result(), about=_about(paths, thin, found)))


def fit_families(
    paths: Sequence[Path], families: Sequence[str], say: Say, keep: Callable[[Fitted], None], each: int, jobs: int
) -> None:
    """Trees of these families alone, by the weights of the fit that ships, which keeps all else; judged by fits that
    leave problems out. Raises `WrongUse` where the files have no times of them."""
    rows = thinned((row for row in launched_as_today(read(paths)) if row.family in families), each)
    if missing := sorted(set(families) - {row.family for row in rows}):
        raise WrongUse(f"The files have no times of {missing[0]}.")
    table, shipped = make_table(rows, "both", jobs), load()
    weights = {family: shipped.weights_of(family) for family in families}
    data = Data(table, table)
    parts = [(outside, fits.fit(table, inside, weights)) for inside, outside in folds(data)]
    chosen = np.concatenate([outside for outside, _ in parts])
    score = np.concatenate([fits.predict(table, outside, found) for outside, found in parts])
    regrets = _first_choices([rows[i] for i in chosen], score)
    mean, worst = float(np.exp(np.log(regrets).mean())), float(regrets.max())
    say(f"Of {len(regrets)} problems left out first choices took {mean:.3f} times the best, {worst:.3f} at worst.")
    found = fits.fit(table, np.arange(len(rows)), weights)
    told = {"files": [path.name for path in paths], "times": len(rows), "made": time.strftime("%Y-%m-%d")}
    told |= {"left_out": {"problems": len(regrets), "mean": mean, "worst": worst}}
    about = {**shipped.about, "families": {**shipped.about.get("families", {}), **dict.fromkeys(families, told)}}
    keep(Fitted({**shipped.weights, **weights}, {**shipped.trees, **found.trees}, about))


def _first_choices(rows: Sequence[Row], score: Floats) -> Floats:
    """Of each problem the time of the kernel with the least score over the least time."""
    groups = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.gpu.name, row.problem].append(i)
    chosen = [
        (rows[min(group, key=lambda i: score[i])].us, min(rows[i].us for i in group)) for group in groups.values()
    ]
    return np.array([us / best for us, best in chosen])


def _about(paths: Sequence[Path], rows: Sequence[Row], judged: dict[str, Judgement]) -> dict[str, Any]:
    """What the fit's file says about it."""
    return {
        "files": [path.name for path in paths], "times": len(rows), "cards": sorted({row.gpu.name for row in rows}),
        "made": time.strftime("%Y-%m-%d"), "left_out": {label: vars(one) for label, one in judged.items()},
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


def _judge_all(
    data: Data, submit: Callable[[Numbers, Numbers], Future[Floats]], say: Say, scores_file: Path | None
) -> dict[str, Judgement]:
    """Say all tables; the judgement of problems left out."""
    rows = data.judged.rows
    parts = folds(data)
    scores = [submit(*part) for part in parts]
    cards = sorted({row.gpu.name for row in rows})
    others = data.judge(lambda row: row.gpu.name != cards[0])
    elsewhere = submit(data.fit(lambda row: row.gpu.name == cards[0]), others) if len(others) else None
    alone, landscapes = campaigns_alone(data)
    of_landscapes = submit(alone, landscapes) if len(landscapes) and len(alone) else None
    chosen = np.concatenate([outside for _, outside in parts])
    score = np.concatenate([one.result() for one in scores])
    if scores_file:
        np.savez_compressed(scores_file, row=chosen, us=data.judged.us[chosen], score=score)
    judged = _report("Problems left out of the fit", [rows[i] for i in chosen], score, say)
    say(spread_table(score, data.judged.us[chosen], problem_keys([rows[i] for i in chosen])))
    if elsewhere:
        _report(f"Fitted on the {cards[0]} alone", [rows[i] for i in others], elsewhere.result(), say)
    if of_landscapes:
        title = "Fitted on campaigns alone, judged on whole landscapes, of problems that the fit did not see"
        _report(title, [rows[i] for i in landscapes], of_landscapes.result(), say)
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


def campaigns_alone(data: Data) -> tuple[Numbers, Numbers]:
    """Campaigns in the fit, and landscapes to be judged: kernels that no search had chosen."""
    problems = {row.problem for row in data.judged.rows if row.source == "landscape"}
    inside = data.fit(lambda row: row.source == "campaign" and row.problem not in problems)
    return inside, data.judge(lambda row: row.source == "landscape")


def judge_by_card(paths: Sequence[Path], card: str, say: Say, each: int = EACH, jobs: int = 1) -> None:
    """Judge two fits to one card's times on files of another: to all, and to those of other problems than theirs."""
    judged = launched_as_today(read(paths))
    named = {path.resolve() for path in paths}
    known = thinned(read(path for path in files() if path.resolve() not in named), each)
    table = make_table(judged, "compiler", jobs)
    for title, rows in rows_of_card(known, judged, card).items():
        found = fits.fit(make_table(rows, "both", jobs), np.arange(len(rows)))
        _report(title, judged, fits.predict(table, np.arange(len(judged)), found), say)


def rows_of_card(known: Sequence[Row], judged: Sequence[Row], card: str) -> dict[str, list[Row]]:
    """The rows of each fit, by the table's title, of kernels that are launched so today. Raises `WrongUse` if a judged
    row is of the card itself, or a fit would have none."""
    if any(row.gpu.name == card for row in judged):
        raise WrongUse(f"The judged files hold times of {card}, to which the model is fitted.")
    problems = {row.problem for row in judged}
    here = [row for row in launched_as_today(known) if row.gpu.name == card]
    other = [row for row in here if row.problem not in problems]
    if not other:
        raise WrongUse(f"There are no times of other problems on {card}.")
    return {f"Fitted on {card}": here, f"Fitted on {card}, without these problems": other}


def order_on(gpu: GpuSpec, paths: Sequence[Path]) -> Iterator[str]:
    """How a card that was never measured would order kernels that an H100 ran, by the fit that ships: lines of a table.
    Of all cards' kernels those that are valid on this one."""
    problems: dict[AttentionProblem, list[Row]] = defaultdict(list)
    for row in read(paths):
        family = registry.lookup(row.family)
        if row.gpu.name == "h100" and for_all_cards(row) and not family.why_invalid(row.problem, row.config, gpu):
            problems[row.problem].append(row)
    name = gpu.name
    yield f"| problem | kernels | order of {name} and measured H100 | {name}'s first | bound | its place on the H100 |"
    yield "|---|---|---|---|---|---|"
    for problem, rows in problems.items():
        found = [(cost(problem, row.config, gpu, row.registers), row) for row in rows]
        scored = [(one, row) for one, row in found if one]
        if len(scored) >= LEAST:
            yield _order_line(problem, scored)


def _order_line(problem: AttentionProblem, scored: Sequence[tuple[Cost, Row]]) -> str:
    correlation = rank_correlation([one.score for one, _ in scored], [row.us for _, row in scored])
    said, first = min(scored, key=lambda item: item[0].score)
    best = min(row.us for _, row in scored)
    place = 1 + sum(row.us < first.us for _, row in scored)
    tile = f"{first.family} {first.config['BLOCK_M']}×{first.config['BLOCK_N']}"
    return (
        f"| {problem.describe()} | {len(scored)} | {correlation:.2f} | {tile} | {said.bound} | {place}, "
        f"{first.us / best:.2f} times the best |"
    )


def measured_twice(paths: Sequence[Path]) -> str:
    """How alike two measurings of the same kernels order them: no model can be nearer to either."""
    problems = [found for path in paths if not is_landscape(path) for found in _twice(path)]
    if not problems:
        raise WrongUse(f"No problem of these files has {LEAST_TWICE} kernels that were timed twice.")
    first = [us for search, _ in problems for us in search]
    second = [us for _, final in problems for us in final]
    keys = [i for i, (search, _) in enumerate(problems) for _ in search]
    return spread_table(first, second, keys, LEAST_TWICE)


def _twice(path: Path) -> Iterator[tuple[list[float], list[float]]]:
    """Of each problem of a campaign: (times of the search, times of the final table) of the same kernels."""
    for group in campaign(path).groups:
        final: dict[str, Any] = group.get("final") or {"kernels": [], "us": []}
        known = {kernel["id"]: kernel for kernel in group["kernels"]}
        for index, row in enumerate(final["us"]):
            pairs = [
                (known[name]["times"][str(index)], us)
                for name, us in zip(final["kernels"], row, strict=True)
                if us and name in known and str(index) in known[name]["times"] and index not in known[name]["rough"]
            ]
            if len(pairs) >= LEAST_TWICE:
                yield [first for first, _ in pairs], [second for _, second in pairs]
