"""Which kernels come with evoattn: of each kind of problems those that cover what was measured, and some for all of
plain attention, of which the best by the cost model is near the best of all on problems as people have them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evoattn.engine.groups import Group
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import KernelConfig, Value
from evoattn.portfolio import campaign
from evoattn.portfolio.campaign import bits_of
from evoattn.portfolio.canonical import likely
from evoattn.portfolio.kernels import Genes, KernelList, kind_of
from evoattn.portfolio.pick import whole
from evoattn.portfolio.workload import DRAWS, PLAIN

SEEDS, EACH = range(50, 68), 20
"""Seeds of the problems that the general kernels are chosen for, below 100 as all that is built from, and problems of
each."""
IN_FP32 = 3
"""Every third of them counts in fp32 too: one in twenty is drawn so."""
MOST_GENERAL = {"16": 80, "32": 60}
"""By bits. On 697 drawn problems of all kinds the best of 80 scores 1.9 % behind the best of 5,759 before climbs, of 40
3.9 %, of 120 1.0 %."""
MOST_OF_A_KIND = 12
LEAST_SAVED = 0.01
"""Sum of logarithms over the problems of a kind: what a kernel must save beside those before it."""
MOST_LOST = 1.0
"""Natural logarithm: no problem counts for more."""


@dataclass
class Kind:
    """The problems of a kind that were measured, and what each kernel loses on them."""

    problems: int = 0
    lost: dict[str, dict[int, float]] = field(default_factory=dict)
    """By kernel and problem: logarithm of its time over the best."""

    def covering(self) -> list[str]:
        """At most MOST_OF_A_KIND kernels, chosen one by one, each the one that saves most beside those before it."""
        left, chosen = [MOST_LOST] * self.problems, list[str]()

        def saved(name: str) -> float:
            return sum(max(0.0, left[i] - lost) for i, lost in self.lost[name].items())

        while len(chosen) < MOST_OF_A_KIND and self.lost:
            best = max(self.lost, key=saved)
            if saved(best) < LEAST_SAVED:
                break
            chosen.append(best)
            for i, lost in self.lost[best].items():
                left[i] = min(left[i], lost)
        return chosen


def measured_kinds(groups: Iterable[Group]) -> tuple[dict[str, Kind], dict[str, KernelConfig]]:
    """The kinds of problems of measured groups, and their right kernels by name."""
    kinds: dict[str, Kind] = {}
    configs: dict[str, KernelConfig] = {}
    for group in groups:
        for index, problem in enumerate(group.problems):
            best, kind = group.best(index), kinds.setdefault(kind_of(problem), Kind())
            for kernel in group.kernels.values():
                if kernel.state == "right" and index in kernel.times and index not in kernel.rough:
                    config = whole(kernel.config)
                    configs[config.id] = config
                    known, lost = kind.lost.setdefault(config.id, {}), math.log(kernel.times[index] / best)
                    known[kind.problems] = min(lost, known.get(kind.problems, lost))
            kind.problems += 1
    return kinds, configs


def problems_to_serve() -> list[AttentionProblem]:
    """Of plain attention, drawn as people have them (`portfolio/workload.py`)."""
    found = [p for seed in SEEDS for p in DRAWS[PLAIN](seed, EACH)]
    for problem in found[::IN_FP32]:
        try:
            found.append(problem.with_(dtype="fp32"))
        except ProblemError:  # larger than there is room for
            continue
    return [likely(problem) for problem in found]


def _log_costs(problem: AttentionProblem, configs: Sequence[KernelConfig], gpu: GpuSpec) -> NDArray[np.float64]:
    """[configs]: logarithms of their scores, infinite where a config cannot serve the problem."""
    from evoattn.cost.cost import scores

    able = [i for i, c in enumerate(configs) if not registry.lookup(c.family).why_impossible(problem, c, gpu)]
    found = np.full(len(configs), np.inf)
    found[able] = np.log(scores(problem, [configs[i] for i in able], gpu))
    return found


def general(
    configs: Sequence[KernelConfig], problems: Sequence[AttentionProblem], gpu: GpuSpec, jobs: int | None = None
) -> list[str]:
    """Names of at most MOST_GENERAL configs by bits, chosen one by one, each the one that saves most beside those
    before it: the mean logarithm of the best one's score over the best of all. `jobs` processes work on it, all cores
    unless given, some 0.2 ms a config and problem."""
    chosen: dict[str, None] = {}
    if not configs:
        return []
    with ProcessPoolExecutor(jobs or os.cpu_count()) as workers:
        costs = np.array(list(workers.map(partial(_log_costs, configs=configs, gpu=gpu), problems, chunksize=8)))
    for bits, count in MOST_GENERAL.items():
        rows = [i for i, p in enumerate(problems) if bits_of(p) == bits and np.isfinite(costs[i]).any()]
        lost = np.clip(costs[rows] - costs[rows].min(axis=1, keepdims=True), 0.0, MOST_LOST)
        left = np.full(len(rows), MOST_LOST)
        for _ in range(count):
            gains = np.maximum(left[:, None] - lost, 0.0).sum(axis=0)
            best = int(gains.argmax())
            if gains[best] <= 0.0:
                break
            chosen[configs[best].id] = None
            left = np.minimum(left, lost[:, best])
    return list(chosen)


def genes_of(configs: Iterable[KernelConfig]) -> dict[str, Genes]:
    """By family: the values that each parameter has in one of the configs."""
    genes: dict[str, dict[str, set[Value]]] = {}
    for config in configs:
        for name, value in config.params.items():
            genes.setdefault(config.family, {}).setdefault(name, set()).add(value)
    return {
        family: {name: sorted(values, key=lambda v: (str(type(v)), v)) for name, values in found.items()}
        for family, found in genes.items()
    }


def select(files: Sequence[Path], gpu: GpuSpec, today: KernelList | None, jobs: int | None = None) -> KernelList:
    """The list of these campaigns and of `today`: kinds that they measured have the kernels that cover them, others
    keep theirs. Raises `OSError` or `ValueError` on a file that cannot be read."""
    return select_of((group for file in files for group in campaign.load(file)[1]), gpu, today, jobs)


def select_of(
    groups: Iterable[Group], gpu: GpuSpec, today: KernelList | None, jobs: int | None = None, beside: bool = False
) -> KernelList:
    """As `select`, of measured groups. `beside`: kinds that they measured keep the kernels of `today`, too."""
    kinds, configs = measured_kinds(groups)
    own = {kind: found.covering() for kind, found in kinds.items()}
    if today:
        configs |= {config.id: config for config in today.kernels}
        theirs = {kind: [today.kernels[i].id for i in places] for kind, places in today.kinds.items()}
        if beside:
            own = {kind: list(dict.fromkeys([*names, *theirs.get(kind, ())])) for kind, names in own.items()}
        own = theirs | own
    fast = list(dict.fromkeys(name for names in own.values() for name in names))
    everywhere = general([configs[name] for name in fast], problems_to_serve(), gpu, jobs)
    places = {name: i for i, name in enumerate(dict.fromkeys([*fast, *everywhere]))}
    kernels = tuple(configs[name] for name in places)
    genes = genes_of(kernels)
    for family, known in (today.genes if today else {}).items():
        mine = genes.setdefault(family, {})
        genes[family] = {
            name: sorted({*known.get(name, ()), *mine.get(name, ())}, key=lambda v: (str(type(v)), v))
            for name in {**known, **mine}
        }
    return KernelList(
        gpu.arch,
        today.cards if today else (gpu.name,),
        today.skipped if today else (),
        today.regret if today else {},
        genes,
        kernels,
        tuple(places[name] for name in everywhere),
        {kind: tuple(places[name] for name in names) for kind, names in own.items() if names},
    )
