"""Regression trees as plain tables, and as columns of a file, which take a third of the bytes.

Nodes are in the order of a walk that takes the left side first, as scikit-learn has them. So a node's left child is the
next node, and the right child so many nodes on as the left side has and one. Inner nodes ask few different questions:
each has the number of its own in a table of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]
LEVELS = 2
"""After so many levels the walks that have reached a leaf are left out."""
THRESHOLD = np.float32
STEP = 2.0**-16
"""In a file leaves are whole numbers of it. With one 8 times as large neighbours of a climb tie that do not: 8 of 420
picks end at slower kernels then."""
_QUESTION = {"feature": np.uint8, "threshold": THRESHOLD, "missing_left": np.bool_}
COLUMNS = ("to_right", "question", "value", *_QUESTION)
"""Of trees in a file."""


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

    def columns(self) -> Columns:
        """These trees in a file. Raises `ValueError` where a left child is not the next node."""
        nodes = np.arange(len(self.left))
        inner = self.left != nodes
        if (self.left[inner] != nodes[inner] + 1).any():
            raise ValueError("The nodes do not lie in the order of a walk that takes the left side first.")
        asked = np.empty(inner.sum(), list(_QUESTION.items()))
        for name in _QUESTION:
            asked[name] = getattr(self, name)[inner]
        questions, number = np.unique(asked, return_inverse=True)
        return {
            "to_right": _small(self.right - nodes),
            "question": _small(number),
            "value": _small(np.rint(self.value[~inner] / STEP).astype(np.int64)),
        } | {name: questions[name] for name in _QUESTION}

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], names: tuple[str, ...], depth: int, base: float) -> Trees:
        """The trees whose `columns` these are: the same again but for the roundings to `STEP` and `THRESHOLD`."""
        to_right = columns["to_right"].astype(np.int64)
        nodes, inner = np.arange(len(to_right)), to_right > 0

        def spread(of_some: NDArray[Any], where: NDArray[np.bool_], kind: type[np.generic]) -> NDArray[Any]:
            """A column of all nodes, zero for the others."""
            column = np.zeros(len(nodes), kind)
            column[where] = of_some
            return column

        whole = columns["value"].dtype.kind != "f"  # files of before have the leaves themselves
        to_come = np.cumsum(np.where(inner, 1, -1))  # nodes but for trees: a tree ends where it is a new least
        ends = np.diff(np.minimum.accumulate(np.minimum(to_come, 0)), prepend=0) < 0

        def asked(name: str, kind: type[np.generic]) -> NDArray[Any]:
            return spread(columns[name][columns["question"]], inner, kind)

        return cls(
            names,
            roots=np.flatnonzero(np.roll(ends, 1)),
            feature=asked("feature", np.int64),
            threshold=asked("threshold", np.float64),
            missing_left=asked("missing_left", np.bool_),
            left=nodes + inner,
            right=nodes + to_right,
            value=spread(columns["value"] * (STEP if whole else 1.0), ~inner, np.float64),
            depth=depth,
            base=base,
        )


def _small(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """In the least type that holds them."""
    least, most = numbers.min(initial=0), numbers.max(initial=0)
    return numbers.astype(np.min_scalar_type(min(least, ~most) if least < 0 else most))
