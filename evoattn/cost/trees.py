"""Regression trees as plain tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVELS = 2
"""After so many levels the walks that have reached a leaf are left out."""


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

    @cached_property
    def _children(self) -> NDArray[np.int64]:
        """Of each node the right child, then the left one."""
        return np.stack([self.right, self.left], axis=1).ravel()

    def predict(self, rows: Floats) -> Floats:
        """The sum of the leaves for each row of features."""
        values, first = rows.ravel(), np.repeat(rows.shape[1] * np.arange(len(rows)), len(self.roots))
        reached, missing = np.tile(self.roots, len(rows)), bool(np.isnan(values).any())
        node, walks = reached, np.arange(len(reached))
        for level in range(1, self.depth + 1):
            x = values.take(first + self.feature.take(node))
            left = x <= self.threshold.take(node)
            if missing:
                left |= np.isnan(x) & self.missing_left.take(node)
            node = self._children.take(2 * node + left)
            if level % LEVELS == 0 or level == self.depth:  # most leaves lie far above the deepest one
                reached[walks] = node
                inner = np.flatnonzero(self.left.take(node) != node)
                node, first, walks = node[inner], first[inner], walks[inner]
        total: Floats = self.base + self.value[reached.reshape(len(rows), len(self.roots))].sum(axis=1)
        return total
