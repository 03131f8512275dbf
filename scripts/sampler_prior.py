"""Fit the prior of the guided samplers to what was measured on other problems.

    python scripts/sampler_prior.py docs/landscapes/h100.jsonl.gz docs/campaigns/h100-2026-11-22-[ab].jsonl.gz
    python scripts/sampler_prior.py … --without 'fp16 d64 full' -o build/priors/'fp16 d64 full'.npz

The first writes `evoattn/samplers/data/prior-sm_90.npz`, which ships. The second leaves out a group of landscapes: a
replay of one of them then knows nothing of its group's kernels (`scripts/replay.py`). The trees are scikit-learn's
histogram gradient boosting; it is checked that `evoattn/samplers/prior.py` evaluates them alike.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, KernelConfig, load_space
from evoattn.samplers import landscape
from evoattn.samplers.features import gene_features, launch_features, problem_features
from evoattn.samplers.prior import DATA, FamilyPrior, Trees, save

CLIP = 1.0
"""Log of a time over the best beyond which all are equally bad; failures count as this."""
ITERATIONS, RATE, LEAVES, LEAST_IN_LEAF = 300, 0.1, 31, 20


class Measured(NamedTuple):
    """A config on a problem, and the log of its time over the problem's best."""

    group: str
    family: str
    params: dict[str, Any]
    problem: AttentionProblem
    target: float


def of_landscapes(path: Path) -> list[Measured]:
    """All configs of a file of landscapes."""
    found = []
    for one in landscape.load(path):
        for c in (*one.configs, *one.elsewhere):
            target = CLIP if c.best_us is None else min(CLIP, math.log(c.best_us / one.best))
            if c.best_us is not None or c.state != "right":
                found.append(Measured(one.group, c.family, c.params, one.problem, target))
    return found


def of_campaign(path: Path) -> list[Measured]:
    """All times of a campaign of `scripts/portfolio_campaign.py`."""
    found = []
    with gzip.open(path, "rt") as file:
        next(file)
        for row in map(json.loads, file):
            problems = [AttentionProblem(**p) for p in row["problems"]]
            best = [math.inf] * len(problems)
            for kernel in row["kernels"]:
                for i, us in kernel["times"].items():
                    best[int(i)] = min(best[int(i)], us)
            for kernel in row["kernels"]:
                for i, us in kernel["times"].items():
                    target = min(CLIP, math.log(us / best[int(i)]))
                    found.append(Measured("campaign", kernel["family"], kernel["params"], problems[int(i)], target))
    return found


def features(rows: list[Measured], gpu: GpuSpec) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By family: features, targets and groups of the configs that today's spaces have."""
    kept: dict[str, list[tuple[list[float], float, str]]] = defaultdict(list)
    for row in rows:
        space = load_space(row.family, gpu)
        try:
            config = KernelConfig(row.family, space.make_config(row.params).params)
            numbers = gene_features(space, row.params) + launch_features(row.problem, config, gpu)
        except ConfigError:
            continue
        kept[row.family].append((numbers + problem_features(row.problem, gpu), row.target, row.group))
    return {
        family: (np.array([r[0] for r in found]), np.array([r[1] for r in found]), np.array([r[2] for r in found]))
        for family, found in kept.items()
    }


def fit(x: np.ndarray, y: np.ndarray) -> Trees:
    """Boosted trees. Raises `ArithmeticError` if they are not evaluated as scikit-learn does."""
    x = x.astype(np.float32)  # some thresholds are values: they must compare alike when they are stored
    model = HistGradientBoostingRegressor(
        max_iter=ITERATIONS, learning_rate=RATE, max_leaf_nodes=LEAVES, min_samples_leaf=LEAST_IN_LEAF, random_state=0
    ).fit(x, y, sample_weight=np.exp(-y))  # good ones count most: among them the choice is made
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    roots, first = [], 0
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        roots.append(first)
        parts["feature"].append(np.where(nodes["is_leaf"], -1, nodes["feature_idx"].astype(np.int64)))
        parts["threshold"].append(nodes["num_threshold"].astype(np.float32))
        parts["left"].append(nodes["left"].astype(np.int64) + first)
        parts["right"].append(nodes["right"].astype(np.int64) + first)
        parts["value"].append(nodes["value"])
        first += len(nodes)
    arrays = {name: np.concatenate(found) for name, found in parts.items()}
    trees = Trees(float(model._baseline_prediction.item()), np.array(roots), **arrays)
    if np.quantile(np.abs(trees.predict(x[:2000]) - model.predict(x[:2000])), 0.99) > 1e-4:
        raise ArithmeticError("The trees are not evaluated as scikit-learn evaluates them.")
    return trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--without", action="append", default=[], help="a group of landscapes to leave out")
    parser.add_argument("--each", type=Path, help="a folder: one file per group, without that group")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--gpu", default="h100")
    words = parser.parse_args()
    gpu, rows = GPUS[words.gpu], []
    for path in words.files:
        rows += of_campaign(path) if "campaign" in path.parent.name else of_landscapes(path)
    tables = features(rows, gpu)
    print({family: len(y) for family, (_, y, _) in tables.items()}, flush=True)
    groups = sorted({row.group for row in rows} - {"campaign"})
    wanted = {words.output or DATA / f"prior-{gpu.arch}.npz": words.without}
    if words.each:
        words.each.mkdir(parents=True, exist_ok=True)
        wanted = {words.each / f"{name}.npz": [name] for name in groups}
    for path, without in wanted.items():
        started = time.monotonic()
        fitted = {}
        for family, (x, y, group) in tables.items():
            kept = ~np.isin(group, without)
            if kept.sum() >= 10 * LEAST_IN_LEAF:
                fitted[family] = FamilyPrior(load_space(family, gpu).names(), fit(x[kept], y[kept]))
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, fitted)
        print(f"{path}: {path.stat().st_size >> 10} KB, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
