"""Fit the cost model to all measured times in the repository, judge it on problems left out, and write the tables.

python -m scripts.cost.fit --jobs 2       # 18 minutes on two cores; writes evoattn/cost/data/fitted.npz
python -m scripts.cost.fit --judge-only   # writes nothing
python -m scripts.cost.fit reports/measurements/h100.npz/h100-2026-11-22-a --fit-only FILE   # no judging
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from evoattn.cost.fitted import DATA, Fitted, save
from scripts.cost.fitting import fit, predict
from scripts.cost.judge import HEAD, Judgement, spread_table
from scripts.cost.judged_sets import judged_sets, problem_keys
from scripts.cost.measured import Row, files, launched_as_today, read, thinned
from scripts.cost.table import Floats, Numbers, Table, make_table

EACH = 40
"""Rows of a problem of a campaign in the fit, a third of them its fastest; of landscapes more. All are judged."""
FOLDS = 3


@dataclass(frozen=True)
class Data:
    """Measured rows: all, with the compiler's registers, as they are judged, and those in the fit as they are there."""

    judged: Table
    fitted: Table
    threads: int
    """Of a fit."""

    def judge(self, keep: Callable[[Row], bool]) -> Numbers:
        """Which of the judged rows are kept."""
        return np.flatnonzero([keep(row) for row in self.judged.rows])

    def fit(self, keep: Callable[[Row], bool]) -> Numbers:
        """Which of the fitted rows are kept."""
        return np.flatnonzero([keep(row) for row in self.fitted.rows])


DATA_OF_PROCESS: list[Data] = []
"""The data, for processes that were forked: they need not be sent there."""


def fit_here(inside: Numbers) -> Fitted:
    """A fit to these rows of the process's data."""
    (data,) = DATA_OF_PROCESS
    with threadpool_limits(data.threads):
        return fit(data.fitted, inside)


def judge_here(inside: Numbers, outside: Numbers) -> Floats:
    """The scores of the rows outside by a fit to those inside."""
    return predict(DATA_OF_PROCESS[0].judged, outside, fit_here(inside))


def folds(data: Data, count: int = FOLDS) -> list[tuple[Numbers, Numbers]]:
    """(rows in the fit, rows judged by it), so that no fit saw a time of its judged problems on any card."""
    problems = sorted({row.problem for row in data.judged.rows}, key=lambda p: p.describe())
    np.random.default_rng(0).shuffle(problems)
    fold = {problem: i % count for i, problem in enumerate(problems)}
    return [
        (data.fit(lambda row, k=k: fold[row.problem] != k), data.judge(lambda row, k=k: fold[row.problem] == k))
        for k in range(count)
    ]


def campaigns_alone(data: Data) -> tuple[Numbers, Numbers]:
    """Campaigns in the fit, and landscapes to be judged: kernels that no search had chosen."""
    problems = {row.problem for row in data.judged.rows if row.source == "landscape"}
    inside = data.fit(lambda row: row.source == "campaign" and row.problem not in problems)
    return inside, data.judge(lambda row: row.source == "landscape")


def report(title: str, rows: Sequence[Row], score: Floats) -> dict[str, Judgement]:
    """Print the tables of these scores."""
    found = judged_sets(rows, score)
    print(f"{title}:\n{HEAD if found else 'none'}")
    for label, one in found.items():
        print(one.line(label), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of the repository")
    parser.add_argument("--judge-only", action="store_true", help="write no file")
    parser.add_argument("--fit-only", type=Path, metavar="FILE", help="write the fit there, and judge nothing")
    parser.add_argument("--out", type=Path, default=DATA, help="where the fit is written")
    parser.add_argument("--scores", type=Path, help="where scores of problems left out are written, as .npz")
    parser.add_argument("--each", type=int, default=EACH, help="rows of a problem in the fit")
    parser.add_argument("--judged", type=int, help="rows of a problem of a campaign that are judged, not all")
    parser.add_argument("--jobs", type=int, default=1, help=f"processes, of which {FOLDS + 3} fit")
    options = parser.parse_args()
    started, paths, jobs = time.monotonic(), options.files or files(), options.jobs
    every = launched_as_today(read(paths))
    thin = thinned(every, options.each)
    if options.fit_only:
        save(fit(make_table(thin, "both", jobs), np.arange(len(thin))), options.fit_only)
        return
    judged = thinned(every, options.judged) if options.judged else every
    data = Data(make_table(judged, "compiler", jobs), make_table(thin, "both", jobs), max(1, jobs // (FOLDS + 3)))
    DATA_OF_PROCESS[:] = [data]
    print(f"{len(thin)} times in the fit, {len(judged)} judged, {time.monotonic() - started:.0f} s", flush=True)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        whole = None if options.judge_only else pool.submit(fit_here, np.arange(len(thin)))
        if whole:
            whole.add_done_callback(lambda done: save(done.result(), options.out))  # should the judging be cut off
        found = judge_all(data, pool.submit, options.scores)
        if whole:
            cards = sorted({row.gpu.name for row in judged})
            about = {
                "files": [path.name for path in paths], "times": len(thin), "cards": cards,
                "made": time.strftime("%Y-%m-%d"), "left_out": {label: vars(one) for label, one in found.items()},
            }  # fmt: skip
            save(replace(whole.result(), about=about), options.out)
            print(f"Wrote {options.out} ({options.out.stat().st_size >> 10} KB)")
    print(f"{time.monotonic() - started:.0f} s")


def judge_all(
    data: Data, submit: Callable[..., Future[Floats]], scores_file: Path | None = None
) -> dict[str, Judgement]:
    """Print all tables; the judgement of problems left out."""
    rows = data.judged.rows
    start = partial(submit, judge_here)
    parts = folds(data)
    scores = [start(*part) for part in parts]
    cards = sorted({row.gpu.name for row in rows})
    first = data.fit(lambda row: row.gpu.name == cards[0])
    others = data.judge(lambda row: row.gpu.name != cards[0])
    elsewhere = start(first, others) if len(others) else None
    alone, landscapes = campaigns_alone(data)
    of_landscapes = start(alone, landscapes) if len(landscapes) and len(alone) else None
    chosen = np.concatenate([outside for _, outside in parts])
    score = np.concatenate([one.result() for one in scores])
    if scores_file:
        np.savez_compressed(scores_file, row=chosen, us=data.judged.us[chosen], score=score)
    judged = report("Problems left out of the fit", [rows[i] for i in chosen], score)
    print(spread_table(score, data.judged.us[chosen], problem_keys([rows[i] for i in chosen])))
    if elsewhere:
        report(f"Fitted on the {cards[0]} alone", [rows[i] for i in others], elsewhere.result())
    if of_landscapes:
        title = "Fitted on campaigns alone, judged on whole landscapes, of problems that the fit did not see"
        report(title, [rows[i] for i in landscapes], of_landscapes.result())
    return judged


if __name__ == "__main__":
    main()
