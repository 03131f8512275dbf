"""Which kernels come with evoattn: of all that were fastest on a measured problem a short list, of which the best by the
cost model is near the best of all on problems as people have them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import KernelConfig, Value
from evoattn.portfolio import campaign
from evoattn.portfolio.canonical import likely
from evoattn.portfolio.kernels import Genes, kind_of
from evoattn.portfolio.problems import bits_of
from evoattn.portfolio.workload import DRAWS, PLAIN

SEEDS = range(50, 68)
"""Of the problems that a list is chosen for: below 100, as all that is built from."""
EACH_PLAIN, EACH_OTHER, OTHER_SEEDS = 20, 15, 3
"""Problems of a seed: of plain attention, and of each other kind, of which the first seeds are drawn."""
IN_FP32 = 3
"""Every third plain problem counts in fp32 too: one in twenty is drawn so."""
FEWEST = {"16": 2, "32": 1}
"""Problems on which a kernel was the fastest, by bits."""
FEWEST_TIMED = 3
"""Problems of a kind on which two kernels were timed."""
MOST_LOST = 1.0
"""Natural logarithm: no problem counts for more."""


@dataclass(frozen=True)
class Found:
    """What campaigns found: kernels that were the fastest, and the kinds of problems that were timed."""

    kernels: tuple[KernelConfig, ...]
    genes: dict[str, Genes]
    kinds: frozenset[str]


def found_in(files: Iterable[Path]) -> Found:
    """Raises `OSError` or `ValueError` on a file that cannot be read."""
    fastest: dict[str, Counter[str]] = {"16": Counter(), "32": Counter()}
    configs: dict[str, KernelConfig] = {}
    kinds: Counter[str] = Counter()
    for file in files:
        _, groups, _ = campaign.load(file)
        for group in groups:
            for index, problem in enumerate(group.problems):
                timed = [k for k in group.kernels.values() if k.state == "right" and index in k.times]
                if not timed:
                    continue
                best = min(timed, key=lambda kernel: kernel.times[index])
                config = KernelConfig(best.family, best.params)
                configs[config.id] = config
                fastest[bits_of(problem)][config.id] += 1
                kinds[kind_of(problem)] += len(timed) > 1
    genes: dict[str, dict[str, set[Value]]] = {}
    for config in configs.values():
        for name, value in config.params.items():
            genes.setdefault(config.family, {}).setdefault(name, set()).add(value)
    often = {name for bits, counted in fastest.items() for name, times in counted.items() if times >= FEWEST[bits]}
    return Found(
        tuple(config for name, config in configs.items() if name in often),
        {family: {name: sorted(values) for name, values in found.items()} for family, found in genes.items()},
        frozenset(kind for kind, timed in kinds.items() if timed >= FEWEST_TIMED),
    )


def problems_to_serve() -> list[AttentionProblem]:
    """Drawn as people have them (`portfolio/workload.py`), as `evoattn.attention` sees them."""
    found = [p for seed in SEEDS for p in DRAWS[PLAIN](seed, EACH_PLAIN)]
    for problem in found[::IN_FP32]:
        try:
            found.append(problem.with_(dtype="fp32"))
        except ProblemError:  # larger than there is room for
            continue
    others = (kind for kind in DRAWS if kind != PLAIN)
    found += [p for kind in others for seed in SEEDS[:OTHER_SEEDS] for p in DRAWS[kind](seed, EACH_OTHER)]
    return [likely(problem) for problem in found]


def _log_costs(problem: AttentionProblem, configs: Sequence[KernelConfig], gpu: GpuSpec) -> NDArray[np.float64]:
    """[configs]: logarithms of their scores, infinite where a config cannot serve the problem."""
    from evoattn.cost.cost import scores

    able = [i for i, c in enumerate(configs) if not registry.lookup(c.family).why_impossible(problem, c, gpu)]
    found = np.full(len(configs), np.inf)
    found[able] = np.log(scores(problem, [configs[i] for i in able], gpu))
    return found


def select(
    configs: Sequence[KernelConfig], problems: Sequence[AttentionProblem], gpu: GpuSpec, most: dict[str, int]
) -> tuple[KernelConfig, ...]:
    """At most `most` configs by bits, chosen one by one, each the one that saves most beside those before it: the mean
    logarithm of the best one's score over the best of all. All cores work on it, some 0.2 ms a config and problem."""
    chosen: dict[str, KernelConfig] = {}
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        costs = np.array(list(workers.map(partial(_log_costs, configs=configs, gpu=gpu), problems, chunksize=8)))
    for bits, count in most.items():
        rows = [i for i, p in enumerate(problems) if bits_of(p) == bits and np.isfinite(costs[i]).any()]
        lost = np.clip(costs[rows] - costs[rows].min(axis=1, keepdims=True), 0.0, MOST_LOST)
        left = np.full(len(rows), MOST_LOST)
        for _ in range(count):
            gains = np.maximum(left[:, None] - lost, 0.0).sum(axis=0)
            best = int(gains.argmax())
            if gains[best] <= 0.0:
                break
            chosen[configs[best].id] = configs[best]
            left = np.minimum(left, lost[:, best])
    return tuple(chosen.values())


def left_by(chosen: Sequence[KernelConfig], problems: Sequence[AttentionProblem], gpu: GpuSpec) -> dict[str, float]:
    """By bits: the score of the best of the `chosen` that can serve a problem, geometric mean; infinite where one has
    none."""
    logs: dict[str, list[float]] = {}
    for problem in problems:
        logs.setdefault(bits_of(problem), []).append(float(_log_costs(problem, chosen, gpu).min()))
    return {bits: math.exp(sum(values) / len(values)) for bits, values in logs.items()}
