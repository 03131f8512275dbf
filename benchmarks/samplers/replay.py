"""Replay searches on recorded landscapes: any sampler, many seeds, no GPU.

    python -m benchmarks.samplers.replay LANDSCAPE… --samplers random,genetic,tpe,guided --seeds 20
    python -m benchmarks.samplers.replay LANDSCAPE… --begin portfolio --fitted FILE
            -o replays.json.gz

LANDSCAPE: as reports/measurements/landscapes.npz/h100-a, or a campaign that `evoattn portfolio measure` wrote. A
config that was not recorded becomes the nearest recorded one (`benchmarks/samplers/simulation.py`). --fitted names a
fit of the cost model that knows nothing of the landscapes, made by `evoattn cost fit FILE… --unjudged -o FILE`;
without it guided samplers have no prior. --begin portfolio: the search begins at the portfolio's picks and the starting
configs, as `evoattn search` does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import starmap
from pathlib import Path

import numpy as np

from benchmarks.samplers.simulation import JOBS, replay, spaces_of
from evoattn.cost.fitted import load as load_fitted
from evoattn.cost.landscapes import Landscape, load
from evoattn.families.registry import load_space
from evoattn.model.gpu import lookup
from evoattn.model.space import SearchSpace
from evoattn.samplers.base import MakePool, Sampler, SamplerSetup
from evoattn.samplers.prior import cost_prior
from evoattn.samplers.registry import SAMPLERS, make_sampler
from evoattn.search import starting

NEAR = 1.02
AT = (30, 50, 150, 500)
WORST = 20.0
"""What a search that has found nothing counts as, in means."""


@dataclass(frozen=True)
class Run:
    """One search: (candidates, seconds, best so far over the best) at each improvement."""

    landscape: str
    sampler: str
    seed: int
    improvements: list[tuple[int, float, float]]
    asking_ms: float
    """CPU time per candidate, the replay's own work among it."""

    def after(self, candidates: int) -> float:
        """Best so far over the best; infinite while there is none."""
        return next((r for n, _, r in reversed(self.improvements) if n <= candidates), math.inf)

    def at(self, seconds: float) -> float:
        """The same after so many seconds of the replay."""
        return next((r for _, s, r in reversed(self.improvements) if s <= seconds), math.inf)

    @property
    def near(self) -> tuple[float, float]:
        """(candidates, seconds) until NEAR; infinite if never."""
        return next(((n, s) for n, s, r in self.improvements if r <= NEAR), (math.inf, math.inf))


def begun(landscape: Landscape, begin: str) -> dict[str, SearchSpace]:
    """The recorded spaces, with today's starting configs and the portfolio's picks if they are wanted."""
    spaces, gpu = spaces_of(landscape), lookup(landscape.about["gpu"])
    if begin == "random":
        return spaces
    for name, space in spaces.items():
        known = load_space(name, gpu).starting
        fitting = [c for c in known if all(c.get(p.name) in p.values for p in space.parameters)]
        spaces[name] = replace(space, starting=tuple(fitting))
    return starting.begin(spaces, landscape.problem, gpu)


@cache
def _landscapes(paths: tuple[Path, ...]) -> dict[str, Landscape]:
    return {one.name: one for one in load(*paths)}


@dataclass(frozen=True)
class Wanted:
    """What is the same for all samplers and landscapes."""

    paths: tuple[Path, ...]
    begin: str
    seeds: range
    count: int
    jobs: int
    fitted: Path | None


def searches(wanted: Wanted, name: str, sampler: str) -> list[Run]:
    """The runs of one sampler on one landscape."""
    landscape = _landscapes(wanted.paths)[name]
    spaces, gpu = begun(landscape, wanted.begin), lookup(landscape.about["gpu"])
    known = load_fitted(wanted.fitted) if wanted.fitted else None

    def make(seed: int, make_pool: MakePool) -> Sampler:
        prior = cost_prior(landscape.problem, gpu, known) if known else None
        return make_sampler(sampler, SamplerSetup(spaces, seed, lambda family, params: None, prior, make_pool))

    runs = []
    for seed in wanted.seeds:
        started = time.process_time()
        steps = replay(landscape, partial(make, seed), wanted.count, wanted.jobs)
        asking = 1e3 * (time.process_time() - started) / max(1, len(steps))
        found, best = [], math.inf
        for n, step in enumerate(steps, 1):
            if step.best_us < best:
                best = step.best_us
                found.append((n, round(step.seconds, 2), round(best / landscape.best, 4)))
        runs.append(Run(name, sampler, seed, found, round(asking, 3)))
    return runs


def geomean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(np.minimum(values, WORST)))))


def summary(runs: list[Run], count: int) -> dict[str, float | None]:
    """What the table shows of one sampler."""
    candidates, seconds = (float(np.median(column)) for column in zip(*(r.near for r in runs), strict=True))
    return {
        **{f"after {n}": geomean([r.after(n) for r in runs]) for n in AT if n <= count},
        "candidates to 2 %": candidates if math.isfinite(candidates) else None,
        "seconds to 2 %": seconds if math.isfinite(seconds) else None,
        "runs within 2 %": float(np.mean([math.isfinite(r.near[0]) for r in runs])),
    }


def table(runs: list[Run], count: int) -> str:
    """A Markdown table, a row per sampler."""
    rows = {
        name: summary([r for r in runs if r.sampler == name], count) for name in dict.fromkeys(r.sampler for r in runs)
    }
    titles = list(next(iter(rows.values())))
    lines = [f"| sampler | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(_cell(title, value) for title, value in row.items())} |")
    return "\n".join(lines)


def _cell(title: str, value: float | None) -> str:
    if value is None:
        return "not reached"
    return (
        f"{value:.0%}" if title.startswith("runs") else f"{value:.3f}" if title.startswith("after") else f"{value:.3g}"
    )


def read(path: Path) -> dict[str, list[Run]]:
    """Runs that were kept, by what they were begun at."""
    if not path.exists():
        return {}
    kept = json.loads(gzip.decompress(path.read_bytes()))
    return {begin: [Run(**row) for row in rows] for begin, rows in kept.items()}


def keep(path: Path, begin: str, runs: list[Run]) -> None:
    """Add runs to a file, in place of those of the same sampler and landscape."""
    kept = read(path)
    fresh = {(r.sampler, r.landscape) for r in runs}
    kept[begin] = [r for r in kept.get(begin, []) if (r.sampler, r.landscape) not in fresh] + runs
    text = json.dumps({name: [vars(r) for r in rows] for name, rows in kept.items()}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--begin", choices=("random", "portfolio"), default="random")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=JOBS, help="compile processes that are played")
    parser.add_argument("--only", default="", help="landscapes whose names begin so")
    parser.add_argument("--every", type=int, default=1, help="of the landscapes, each so-many-th")
    parser.add_argument("--least", type=int, default=200, help="right configs that a landscape must have")
    parser.add_argument("--fitted", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    paths = tuple(options.landscapes)
    names = [
        n for n, one in _landscapes(paths).items()
        if n.startswith(options.only) and sum(c.best_us is not None for c in one.configs) >= options.least
    ][:: options.every]  # fmt: skip
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    wanted = Wanted(paths, options.begin, seeds, options.count, options.jobs, options.fitted)
    tasks = [(wanted, name, sampler) for sampler in options.samplers.split(",") for name in names]
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("fork")) as pool:
            runs = [run for found in pool.map(searches, *zip(*tasks, strict=True)) for run in found]
    else:
        runs = [run for found in starmap(searches, tasks) for run in found]
    print(f"{len(names)} landscapes, {options.seeds} seeds, begun at {options.begin}\n\n{table(runs, options.count)}")
    if options.output:
        keep(options.output, options.begin, runs)


if __name__ == "__main__":
    main()
