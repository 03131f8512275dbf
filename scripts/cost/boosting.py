"""Gradient boosting by scikit-learn, as the plain tables of `evoattn/cost/trees.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from evoattn.cost.trees import Floats, Trees

TREES: dict[str, float] = {"max_iter": 220, "learning_rate": 0.1, "max_leaf_nodes": 24, "min_samples_leaf": 15,
                           "l2_regularization": 1.0, "max_bins": 96}  # fmt: skip
MANY_TREES = TREES | {"max_iter": 600, "learning_rate": 0.08, "max_leaf_nodes": 40, "min_samples_leaf": 20,
                      "max_bins": 192}  # fmt: skip
MANY_ROWS = 20_000
"""Rows of a family from which it gets `MANY_TREES`. With them flash_wgmma's correlation within problems left out rose
from 0.900 to about 0.92 in the median; smaller families have too few rows for more."""
MOST_TREES = MANY_TREES | {"max_features": 0.5}
MOST_ROWS = 100_000
"""Rows of a family from which each split sees half of the features, drawn at random. With that, and the `CLOSE` weights
of `scripts/cost/fitting.py`, flash_wgmma's first choice lost 1.024 in place of 1.027 on 256 problems of campaigns p, r
and t, left out of the fit, and 1.029 in place of 1.032 on 190 of a, b and c. split_kv (70,000 rows) gained nothing, and
lost on landscapes."""


def tree_size(rows: int) -> dict[str, float]:
    """The arguments of scikit-learn's boosting for a family of so many rows."""
    return MOST_TREES if rows >= MOST_ROWS else MANY_TREES if rows >= MANY_ROWS else TREES


def fit_trees(names: tuple[str, ...], table: Floats, physical: Floats, measured: Floats, near: Floats) -> Trees:
    """Trees of one family for log(measured / physical) from [row, feature]; rows near the best of their problem weigh
    more."""
    varies = [i for i in range(len(names)) if len(np.unique(table[:, i])) > 1]
    names, table = tuple(names[i] for i in varies), table[:, varies]
    model = HistGradientBoostingRegressor(**tree_size(len(table)), early_stopping=False, random_state=0)
    model.fit(table, np.log(measured / physical), sample_weight=near)
    return _as_trees(model, names)


def _rounded_up(thresholds: Floats) -> Floats:
    """As numbers that float32 has. Thresholds are often values of the data: rounded down they would part these."""
    single = thresholds.astype(np.float32)
    up: Floats = np.where(single < thresholds, np.nextafter(single, np.float32(np.inf)), single).astype(np.float64)
    return up


def _as_trees(model: HistGradientBoostingRegressor, names: tuple[str, ...]) -> Trees:
    """The nodes of scikit-learn's trees in one table."""
    roots, tables, start = [], [], 0
    for (tree,) in model._predictors:  # no public way to them; scikit-learn is pinned
        roots.append(start)
        nodes = tree.nodes.copy()
        own = np.arange(len(nodes))
        leaf = nodes["is_leaf"] == 1
        for side in ("left", "right"):
            nodes[side] = np.where(leaf, own, nodes[side])
        tables.append((nodes, start))
        start += len(nodes)

    def column(name: str) -> NDArray[np.generic]:
        return np.concatenate([nodes[name] for nodes, _ in tables])

    def children(side: str) -> NDArray[np.int64]:
        return np.concatenate([nodes[side].astype(np.int64) + first for nodes, first in tables])

    leaf = column("is_leaf") == 1
    return Trees(
        names, np.array(roots), column("feature_idx").astype(np.int64),
        _rounded_up(column("num_threshold")), column("missing_go_to_left") == 1,
        children("left"), children("right"), np.where(leaf, column("value"), 0.0), int(column("depth").max()),
        float(model._baseline_prediction.ravel()[0]),
    )  # fmt: skip
