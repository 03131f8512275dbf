"""What was fitted to measured times: weights of the physical terms, and trees for what the terms leave over.

Plain numbers in `data/fitted.npz`; `python -m scripts.cost.fit` makes the file anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data" / "fitted.npz"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trees:
    """Regression trees whose leaves are added up: all nodes of all trees in one table. A leaf is its own child."""

    names: tuple[str, ...]
    """The features that they ask, in the order of the columns."""
    roots: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: Floats
    """Left where the feature is at most this."""
    missing_left: NDArray[np.bool_]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: Floats
    depth: int
    base: float

    def predict(self, rows: Floats) -> Floats:
        """The sum of the leaves for each row of features."""
        node = np.broadcast_to(self.roots, (len(rows), len(self.roots)))
        values, first = rows.ravel(), rows.shape[1] * np.arange(len(rows))[:, None]
        missing = bool(np.isnan(values).any())
        for _ in range(self.depth):
            x = values.take(first + self.feature.take(node))
            left = x <= self.threshold.take(node)
            if missing:
                left |= np.isnan(x) & self.missing_left.take(node)
            node = np.where(left, self.left.take(node), self.right.take(node))
        total: Floats = self.base + self.value[node].sum(axis=1)
        return total


@dataclass(frozen=True)
class Weights:
    """Factors of the physical terms of one family. Those of units are one for all families."""

    units: dict[str, float]
    """Of the clocks of each unit, and of `dram`."""
    chain: float
    fetch: float
    ends: float
    launch_us: float


@dataclass(frozen=True)
class Fitted:
    """All that is fitted, by family."""

    weights: dict[str, Weights]
    trees: dict[str, Trees]
    about: dict[str, Any]
    """Which files of measurements, when, and how far the first choice was from the best in problems left out."""


@cache
def load(path: Path = DATA) -> Fitted:
    """The file that `save` wrote."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        weights = {name: Weights(**row) for name, row in about.pop("weights").items()}
        trees = {}
        for name, row in about.pop("trees").items():
            tables = {key: file[f"{name} {key}"] for key in _TABLES}
            value = tables.pop("value").astype(np.float64)
            threshold = tables.pop("threshold").astype(np.float64)
            whole = {
                key: table.astype(np.bool_ if key == "missing_left" else np.int64) for key, table in tables.items()
            }
            trees[name] = Trees(tuple(row["names"]), value=value, threshold=threshold, depth=row["depth"],
                                base=row["base"], **whole)  # fmt: skip
    return Fitted(weights, trees, about)


_TABLES = {
    "roots": np.int32,
    "feature": np.uint8,
    "threshold": np.float32,
    "missing_left": np.bool_,
    "left": np.int32,
    "right": np.int32,
    "value": np.float32,
}
"""Columns of the file, and the types that they are kept in."""


def save(fitted: Fitted, path: Path = DATA) -> None:
    """Write the file."""
    trees = {n: {"names": t.names, "depth": t.depth, "base": t.base} for n, t in fitted.trees.items()}
    weights = {name: dict(row.__dict__) for name, row in fitted.weights.items()}
    tables = {
        f"{name} {key}": getattr(tree, key).astype(kind)
        for name, tree in fitted.trees.items()
        for key, kind in _TABLES.items()
    }
    about = json.dumps(fitted.about | {"weights": weights, "trees": trees})
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, about=np.array(about), **tables)
