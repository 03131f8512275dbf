"""What was fitted to measured times: weights of the physical terms, and trees for what the terms leave over:
regression trees as plain tables, and as columns of a file, which take a third of the bytes. Plain numbers in
`data/fitted.npz`; `evoattn cost fit` makes the file anew.

Nodes are in the order of a walk that takes the left side first, as scikit-learn has them. So a node's left child is
the next node, and the right child so many nodes on as the left side has and one. Inner nodes ask few different
questions: each has the number of its own in a table of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]
LEVELS = 3
"""After so many levels the walks that have reached a leaf are left out."""
THRESHOLD = np.float32
STEP = 2.0**-16
"""In a file leaves are whole numbers of it. With one 8 times as large neighbours of a climb tie that do not: 8 of 420
picks end at slower kernels then."""
_QUESTION = {"feature": np.uint8, "threshold": THRESHOLD, "missing_left": np.bool_}
COLUMNS = ("inner", "question", "value", *_QUESTION)
"""Of trees in a file."""


@dataclass(frozen=True)
class Trees:
    """Regression trees whose leaves are added up: all nodes of all trees in one table."""

    names: tuple[str, ...]
    """The features that they ask, in the order of the columns."""
    roots: NDArray[np.int64]
    question: NDArray[np.int64]
    """Of each node the place of what it asks; a leaf asks nothing."""
    right: NDArray[np.int64]
    """Of each node the right child; a leaf is its own child."""
    value: Floats
    """Of each node, zero but for leaves."""
    feature: NDArray[np.int64]
    threshold: NDArray[np.float32]
    """Left where the feature is at most this."""
    missing_left: NDArray[np.bool_]
    """These three are of questions, of which there are an eighth of the nodes."""
    depth: int
    base: float

    @cached_property
    def _steps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of twice each node, and of the number behind it, what the node asks, and twice its right child, twice its
        left one, which is the next node."""
        nodes = np.arange(len(self.right))
        return self.question.repeat(2), 2 * np.stack([self.right, nodes + (self.right != nodes)], axis=1).ravel()

    def predict(self, rows: Floats) -> Floats:
        """The sum of the leaves for each row of features. Each question is asked of all rows at once, and walks look up
        the answers."""
        count, (question, child) = len(rows), self._steps
        asked = rows.take(self.feature, axis=1)
        answers = asked <= self.threshold
        if np.isnan(rows).any():
            answers |= np.isnan(asked) & self.missing_left
        left, first = answers.ravel().view(np.int8), np.arange(count).repeat(len(self.roots)) * len(self.feature)
        reached = np.tile(2 * self.roots, count)
        node, walks = reached, np.arange(len(reached))
        for level in range(1, self.depth + 1):
            node = child.take(node + left.take(question.take(node) + first))
            if level % LEVELS == 0 or level == self.depth:  # most leaves lie far above the deepest one
                reached[walks] = node
                inner = np.flatnonzero(child.take(node) != node)
                node, first, walks = node.take(inner), first.take(inner), walks.take(inner)
        total: Floats = self.base + self.value.take(reached.reshape(count, len(self.roots)) // 2).sum(axis=1)
        return total

    def and_then(self, more: Trees) -> Trees:
        """The trees whose sum is that of both."""
        names = tuple(dict.fromkeys((*self.names, *more.names)))
        places = np.array([names.index(name) for name in more.names], np.int64)
        asked, nodes = len(self.feature), len(self.right)
        return Trees(
            names,
            np.concatenate([self.roots, more.roots + nodes]),
            np.concatenate([self.question, more.question + asked]),
            np.concatenate([self.right, more.right + nodes]),
            np.concatenate([self.value, more.value]),
            np.concatenate([self.feature, places[more.feature]]),
            np.concatenate([self.threshold, more.threshold]),
            np.concatenate([self.missing_left, more.missing_left]),
            max(self.depth, more.depth),
            self.base + more.base,
        )

    @classmethod
    def of_nodes(
        cls, nodes: NDArray[np.void], roots: NDArray[np.int64], names: tuple[str, ...], depth: int, base: float
    ) -> Trees:
        """The trees of a table of nodes with the fields `left`, `right`, `value`, `feature`, `threshold` and
        `missing_left`. Raises `ValueError` where a left child is not the next node."""
        places = np.arange(len(nodes))
        inner = nodes["right"] != places
        if (nodes["left"][inner] != places[inner] + 1).any():
            raise ValueError("The nodes do not lie in the order of a walk that takes the left side first.")
        asked = np.empty(inner.sum(), list(_QUESTION.items()))
        for name in _QUESTION:
            asked[name] = nodes[name][inner]
        questions, number = np.unique(asked, return_inverse=True)
        question = np.zeros(len(nodes), np.int64)
        question[inner] = number
        value = np.where(inner, 0.0, nodes["value"])
        return cls(names, roots, question, nodes["right"].astype(np.int64), value, *_typed(questions), depth, base)

    def columns(self) -> Columns:
        """These trees in a file."""
        inner = self.right != np.arange(len(self.right))
        return {
            "inner": inner,
            "question": _small(self.question[inner]),
            "value": _small(np.rint(self.value[~inner] / STEP).astype(np.int64)),
        } | {name: getattr(self, name).astype(kind) for name, kind in _QUESTION.items()}

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], names: tuple[str, ...], depth: int, base: float) -> Trees:
        """The trees whose `columns` these are: the same again but for the roundings to `STEP` and `THRESHOLD`."""
        inner = columns["inner"].astype(np.bool_)  # of no nodes a list says no type
        nodes = np.arange(len(inner))
        question, value = np.zeros(len(nodes), np.int64), np.zeros(len(nodes))
        question[inner] = columns["question"]
        whole = columns["value"].dtype.kind != "f"  # files of before have the leaves themselves
        value[~inner] = columns["value"] * (STEP if whole else 1.0)
        to_come = np.cumsum(np.where(inner, 1, -1))  # nodes but for trees: a tree ends where it is a new least
        ends = np.diff(np.minimum.accumulate(np.minimum(to_come, 0)), prepend=0) < 0
        roots = np.flatnonzero(np.roll(ends, 1))
        # A left side ends where there is first one node less to come than at its parent: the right child is next.
        by_level = np.argsort(_small(to_come), kind="stable")  # which is fast for two bytes
        place = np.searchsorted((to_come * len(nodes) + nodes)[by_level], ((to_come - 1) * len(nodes) + nodes)[inner])
        right = nodes.copy()
        right[inner] = by_level[place] + 1
        return cls(names, roots, question, right, value, *_typed(columns), depth, base)


def _typed(
    questions: NDArray[np.void] | Mapping[str, NDArray[Any]],
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
    """The columns of questions as trees have them."""
    feature, threshold, missing_left = (questions[name] for name in _QUESTION)
    return feature.astype(np.int64), threshold.astype(THRESHOLD), missing_left.astype(np.bool_)


def _small(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """In the least type that holds them."""
    least, most = numbers.min(initial=0), numbers.max(initial=0)
    return numbers.astype(np.min_scalar_type(min(least, ~most) if least < 0 else most))


DATA = Path(__file__).parent / "data" / "fitted.npz"


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
    trees: Mapping[str, Trees]
    about: dict[str, Any]
    """Which files of measurements, when, and how far the first choice was from the best in problems left out."""

    def weights_of(self, family: str) -> Weights:
        """Of a family that was never fitted, as a new one is, the geometric means of the others'."""
        if family in self.weights:
            return self.weights[family]
        from statistics import geometric_mean  # 2 ms that few need

        rows = list(self.weights.values())
        mean = {n: geometric_mean([getattr(row, n) for row in rows]) for n in ("chain", "fetch", "ends", "launch_us")}
        return Weights(rows[0].units, **mean)


class StoredTrees(Mapping[str, Trees]):
    """The trees of a file by family, each read when it is first asked for: to choose a kernel takes one family or
    two."""

    def __init__(self, file: bytes, rows: Mapping[str, dict[str, Any]]) -> None:
        """`rows`: of each family the arguments of `Trees.of_columns` that are no columns."""
        self._file, self._rows = file, rows
        self._read: dict[str, Trees] = {}

    def __getitem__(self, family: str) -> Trees:
        if family not in self._read:
            row = self._rows[family]
            with np.load(BytesIO(self._file)) as file:
                columns = {key: _of_bytes(file[f"{family} {key}"]) for key in COLUMNS}
            self._read[family] = Trees.of_columns(columns, tuple(row["names"]), row["depth"], row["base"])
        return self._read[family]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@cache
def load(path: Path = DATA) -> Fitted:
    """The file that `save` wrote."""
    stored = path.read_bytes()
    with np.load(BytesIO(stored)) as file:
        about = json.loads(file["about"].tobytes())
    weights = {name: Weights(**row) for name, row in about.pop("weights").items()}
    return Fitted(weights, StoredTrees(stored, about.pop("trees")), about)


def save(fitted: Fitted, path: Path = DATA) -> None:
    """Write the file."""
    trees = {n: {"names": t.names, "depth": t.depth, "base": t.base} for n, t in fitted.trees.items()}
    weights = {name: dict(row.__dict__) for name, row in fitted.weights.items()}
    columns: dict[str, Any] = {
        f"{name} {key}": column for name, tree in fitted.trees.items() for key, column in tree.columns().items()
    }
    about = json.dumps(fitted.about | {"weights": weights, "trees": trees})
    columns["about"] = np.frombuffer(about.encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=9) as stored:  # 3 KB less than by the level that NumPy takes
        for name, column in columns.items():
            with stored.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, _by_bytes(column))


def _by_bytes(column: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers of several bytes as [byte, number]: all first bytes, then
    all second ones deflate to 15 KB less. Other columns as they are."""
    if column.dtype.kind not in "iu" or column.itemsize == 1:
        return column
    return np.ascontiguousarray(column.view(f"{column.dtype.kind}1").reshape(-1, column.itemsize).T)


def _of_bytes(stored: NDArray[Any]) -> NDArray[Any]:
    """The column that `_by_bytes` stored."""
    if stored.ndim == 1:
        return stored
    return np.ascontiguousarray(stored.T).view(f"{stored.dtype.kind}{len(stored)}").ravel()
