"""What measurements of other problems say of a config: boosted trees per family, fitted beforehand and shipped.

`scripts/sampler_prior.py` fits them to the recorded landscapes and campaigns; here they are only evaluated, by NumPy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.samplers.base import Prior
from evoattn.samplers.features import gene_features, launch_features, problem_features
from evoattn.samplers.pool import Params

DATA = Path(__file__).parent / "data"
UNKNOWN = 0.7
"""For a family that no problem was measured with: a time of twice the best."""
NO_BLOCK_FITS = 5.0
"""For a config of which no block fits on an SM."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trees:
    """A sum of regression trees. A node of `feature` -1 is a leaf; else rows with a value of at most `threshold` go to
    `left`. `roots` are the trees' first nodes."""

    base: float
    roots: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: Array

    def predict(self, rows: Array) -> Array:
        """One number per row of features, which are compared as float32, as they were in the fit."""
        count, values = len(rows), rows.astype(np.float32).ravel()
        total = np.full(count, self.base)
        node = np.tile(self.roots, count)
        row = np.repeat(np.arange(count, dtype=np.int32), len(self.roots))
        while node.size:  # one step down in every tree of every row at once
            feature = self.feature[node]
            leaf = feature < 0
            if leaf.any():
                total += np.bincount(row[leaf], self.value[node[leaf]], count)
                inner = np.flatnonzero(~leaf)
                node, row, feature = node[inner], row[inner], feature[inner]
            lower = values[row * np.int32(rows.shape[1]) + feature] <= self.threshold[node]
            node = np.where(lower, self.left[node], self.right[node])
        return total


ARRAYS = ("roots", "feature", "threshold", "left", "right", "value")


@dataclass(frozen=True)
class FamilyPrior:
    """The trees of one family, and the genes that they were fitted with."""

    genes: tuple[str, ...]
    trees: Trees


def save(path: Path, families: dict[str, FamilyPrior]) -> None:
    """Write the trees of all families as one compressed NumPy file."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, prior in families.items():
        arrays[f"{name}/genes"] = np.array(prior.genes)
        arrays[f"{name}/base"] = np.array(prior.trees.base)
        for field in ARRAYS:
            array = getattr(prior.trees, field)
            arrays[f"{name}/{field}"] = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load(path: Path) -> dict[str, FamilyPrior]:
    """What `save` wrote. Raises `OSError` if it is not there."""
    found: dict[str, dict[str, NDArray[np.generic]]] = defaultdict(dict)
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            family, _, field = key.partition("/")
            found[family][field] = file[key]
    return {name: _family(fields) for name, fields in found.items()}


def _family(fields: dict[str, NDArray[np.generic]]) -> FamilyPrior:
    def whole(name: str) -> NDArray[np.int32]:
        return fields[name].astype(np.int32)

    def real(name: str) -> Array:
        return fields[name].astype(np.float64)

    threshold = fields["threshold"].astype(np.float32)
    nodes = whole("feature"), threshold, whole("left"), whole("right"), real("value")
    trees = Trees(float(real("base")), whole("roots"), *nodes)
    return FamilyPrior(tuple(str(g) for g in fields["genes"]), trees)


def make_prior(
    families: dict[str, FamilyPrior], spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec
) -> Prior:
    """The prior for configs of `spaces` on one problem. A family without trees, or whose genes have changed since, is
    UNKNOWN."""
    known = {n for n, s in spaces.items() if n in families and families[n].genes == s.names()}
    of_problem = problem_features(problem, gpu)

    def row(family: str, params: Params) -> list[float]:
        launch = launch_features(problem, KernelConfig(family, params), gpu)
        return gene_features(spaces[family], params) + launch + of_problem

    def prior(configs: list[tuple[str, Params]]) -> list[float]:
        values = np.full(len(configs), UNKNOWN)
        for name in known:
            chosen = [i for i, (family, _) in enumerate(configs) if family == name]
            if chosen:
                values[chosen] = families[name].trees.predict(np.array([row(*configs[i]) for i in chosen]))
        return [float(v) for v in values]

    return prior


def cost_prior(spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec) -> Prior:
    """The log of the cost model's score over that of the best config of the spaces' `starting`."""
    starting = [KernelConfig(name, params) for name, space in spaces.items() for params in space.starting]
    valid = [c for c in starting if registry.lookup(c.family).why_invalid(problem, c, gpu) is None]
    best = min(scores(problem, valid, gpu), default=math.inf)
    zero = math.log(best) if math.isfinite(best) else 0.0

    def prior(configs: list[tuple[str, Params]]) -> list[float]:
        found = scores(problem, [KernelConfig(family, params) for family, params in configs], gpu)
        return [math.log(score) - zero if math.isfinite(score) else NO_BLOCK_FITS for score in found]

    return prior


def shipped(gpu: GpuSpec) -> Path | None:
    """The file of the trees that were fitted to measurements of the GPU's architecture, if there is one."""
    path = DATA / f"prior-{gpu.arch}.npz"
    return path if path.exists() else None


def prior_for(spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec) -> Prior:
    """The shipped prior for configs of `spaces`, read when it is first asked; for another architecture the cost
    model."""
    path = shipped(gpu)

    @cache
    def made() -> Prior:
        if path is None:
            return cost_prior(spaces, problem, gpu)
        return make_prior(load(path), spaces, problem, gpu)

    return lambda configs: made()(configs)
