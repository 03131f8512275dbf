"""Replay searches of whole search spaces, without a GPU: trees that are fitted to a recorded landscape stand for it.

    python scripts/whole_space.py docs/landscapes/h100-?.jsonl.gz --fitted FILE [--samplers guided,genetic] [--seeds 5]
                                  [--begin portfolio] [--count 200] [--boards 1] [--no-prior] [--only NAMES]

`scripts/replay.py` gives a sampler the nearest of some 2,000 recorded configs, half of which were bred from good ones.
Here it gets every config of today's spaces, of which there are millions, and so has to find good ones by itself. What a
config takes is the mean of extremely randomised trees that learned by how much the cost model's fit in FILE errs on the
landscape, times a number of its own within 1 % of one. FILE is a fit that knows nothing of landscapes, and the
sampler's prior too, as in replay.py. Searches begin at random configs, or with --begin portfolio as `evoattn search`
does.

A sampler thinks ahead as in a search: 16 proposals for each board wait at most. The best of a landscape is the best
that any of the searches found. "seconds" are of 16 compile processes for each board.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import os
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from replay import Run, table
from sklearn.ensemble import ExtraTreesRegressor

from evoattn.cost.fitted import load as load_fitted
from evoattn.families import registry
from evoattn.model.gpu import lookup
from evoattn.model.records import Proposal, Trial
from evoattn.model.space import ConfigError, KernelConfig, config_id
from evoattn.samplers.base import Sampler, SamplerSetup
from evoattn.samplers.landscape import Config, Landscape, load
from evoattn.samplers.prior import cost_prior
from evoattn.samplers.registry import make_sampler
from evoattn.samplers.replay import Line
from evoattn.samplers.thoughts import Encoder
from evoattn.search.ahead import AHEAD
from evoattn.search.spaces import choose_spaces

TREES = 60
OWN = 0.01
"""Most that a config's own number differs from one: what no gene explains."""
FAR = 1.5
"""Log of a time over the best beyond which the prior's differences do not count."""
JOBS = 16
DEVICE_SECONDS = 0.021


class Imagined:
    """What every config of today's spaces takes on a landscape's problem."""

    def __init__(self, landscape: Landscape, fitted: Path, begin: str = "random") -> None:
        self.problem, self.gpu = landscape.problem, lookup(landscape.about["gpu"])
        self._fit = load_fitted(fitted)
        families = tuple(sorted({c.family for c in landscape.configs}))
        self.spaces = choose_spaces(families, (), begin == "portfolio", self.problem, self.gpu)
        self._encoder, self._expected = Encoder(self.spaces), self.prior()
        self._compile_s = {f: median([c.compile_s for c in landscape.configs if c.family == f]) for f in families}
        self._made: dict[str, Config] = {}
        right = [c for c in landscape.configs if c.best_us is not None and self._of_today(c)]
        rows, prior = self._rows([(c.family, self.spaces[c.family].make_config(c.params).params) for c in right])
        errors = np.log([c.best_us for c in right]) - prior
        model = ExtraTreesRegressor(TREES, max_features=0.5, random_state=0).fit(rows, errors)
        self._trees = [tree.tree_ for tree in model.estimators_]

    def _of_today(self, config: Config) -> bool:
        try:
            self.spaces[config.family].make_config(config.params)
        except (KeyError, ConfigError):
            return False
        return True

    def _rows(self, configs: list[tuple[str, dict[str, Any]]]) -> tuple[np.ndarray, np.ndarray]:
        """Features, the prior among them, and the prior."""
        prior = np.minimum(self._expected(configs), FAR)
        return np.column_stack([[self._encoder.row(*c) for c in configs], prior]).astype(np.float32), prior

    def prior(self):
        """A fresh prior of the fit, for one search."""
        return cost_prior(self.problem, self.gpu, self._fit)

    def why_invalid(self, family: str, params: dict[str, Any]) -> str | None:
        return registry.lookup(family).why_invalid(self.problem, KernelConfig(family, params), self.gpu)

    def config(self, family: str, params: dict[str, Any]) -> Config:
        """What becomes of it; all configs are right."""
        identity = config_id(family, params)
        if identity not in self._made:
            rows, prior = self._rows([(family, params)])
            error = np.mean([tree.predict(rows)[0, 0] for tree in self._trees])
            own = 1 + OWN * (int(hashlib.sha256(identity.encode()).hexdigest()[:8], 16) / 2**31 - 1)
            us = math.exp(error + prior[0]) * own
            self._made[identity] = Config(
                0, family, params, "right", "", us, False, 0, 0, self._compile_s[family], DEVICE_SECONDS
            )
        return self._made[identity]


class ThinkingAhead:
    """A sampler's proposals as `evoattn.search.ahead` asks for them."""

    def __init__(self, sampler: Sampler, boards: int) -> None:
        self._sampler, self._most = sampler, AHEAD * boards
        self._proposals: deque[Proposal] = deque()

    def ask(self, n: int) -> list[Proposal]:
        taken = []
        while len(taken) < n:
            if (wanted := self._most - len(self._proposals)) >= self._most // 2:
                self._proposals += self._sampler.ask(wanted)
            if not self._proposals:  # the space is exhausted
                break
            taken.append(self._proposals.popleft())
        return taken

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        self._sampler.tell(proposal, trial)


def searches(
    paths: list[Path], name: str, samplers: list[str], begin: str, seeds: int, count: int, boards: int,
    with_prior: bool, fitted: Path,
) -> list[Run]:  # fmt: skip
    """All runs on one landscape."""
    landscape = next(one for one in load(*paths) if one.name == name)
    imagined = Imagined(landscape, fitted, begin)
    found = []
    for sampler in samplers:
        for seed in range(seeds):
            prior = imagined.prior() if with_prior else None
            made = make_sampler(sampler, SamplerSetup(imagined.spaces, seed, imagined.why_invalid, prior))
            started, best, steps = time.process_time(), math.inf, []
            line = Line(ThinkingAhead(made, boards), imagined, JOBS * boards, DEVICE_SECONDS / boards)
            for n, step in enumerate(islice(line, count), 1):
                if step.best_us < best:
                    best = step.best_us
                    steps.append((n, round(step.seconds, 2), best))
            ms = 1e3 * (time.process_time() - started) / count
            found.append(Run(name, sampler, seed, steps, ms))
    best = min(run.improvements[-1][2] for run in found)
    return [
        Run(r.landscape, r.sampler, r.seed, [(n, s, us / best) for n, s, us in r.improvements], r.asking_ms)
        for r in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", type=Path, nargs="+")
    parser.add_argument("--fitted", type=Path, required=True)
    parser.add_argument("--samplers", default="guided")
    parser.add_argument("--begin", choices=("random", "portfolio"), default="random")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--boards", type=int, default=1)
    parser.add_argument("--no-prior", action="store_true")
    parser.add_argument("--only", default="", help="landscapes whose names begin so")
    parser.add_argument("--least", type=int, default=1600, help="right configs that a landscape must have")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    words = parser.parse_args()
    names = [
        one.name
        for one in load(*words.landscapes)
        if one.name.startswith(words.only) and sum(c.best_us is not None for c in one.configs) >= words.least
    ]
    same = (
        words.samplers.split(","),
        words.begin,
        words.seeds,
        words.count,
        words.boards,
        not words.no_prior,
        words.fitted,
    )
    tasks = [(words.landscapes, name, *same) for name in names]
    with ProcessPoolExecutor(words.processes, multiprocessing.get_context("fork")) as pool:
        runs = [run for found in pool.map(searches, *zip(*tasks, strict=True)) for run in found]
    print(f"{len(names)} landscapes, {words.seeds} seeds, begun at {words.begin}\n\n{table(runs, words.count)}\n")
    for name in same[0]:
        print(f"{name}: {np.mean([r.asking_ms for r in runs if r.sampler == name]):.1f} ms of CPU time per candidate")


if __name__ == "__main__":
    main()
