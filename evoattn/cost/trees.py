"""Regression trees as plain tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
