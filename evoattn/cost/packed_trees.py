"""Trees as they lie in a file: a third of the bytes of their table, and the same trees again but for the roundings of
`VALUE` and `THRESHOLD`.

Nodes are in the order of a walk that takes the left side first, as scikit-learn has them. So a node's left child is the
next node, and the right child so many nodes on as the left side has and one. Inner nodes ask few different questions:
each has the number of its own in a table of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.trees import Trees

VALUE, THRESHOLD = np.float16, np.float32
"""Of a leaf: a prediction is the sum of hundreds, of which each is wrong by a part in 2000 at most."""
_QUESTION = {"feature": np.uint8, "threshold": THRESHOLD, "missing_left": np.bool_}
TABLES = ("roots", "to_right", "question", "value", *_QUESTION)
"""What `pack` gives."""

Tables = dict[str, NDArray[Any]]


def pack(trees: Trees) -> Tables:
    """The tables of a file. Raises `ValueError` where a left child is not the next node."""
    nodes = np.arange(len(trees.left))
    inner = trees.left != nodes
    if (trees.left[inner] != nodes[inner] + 1).any():
        raise ValueError("The nodes do not lie in the order of a walk that takes the left side first.")
    asked = np.empty(inner.sum(), list(_QUESTION.items()))
    for name in _QUESTION:
        asked[name] = getattr(trees, name)[inner]
    questions, number = np.unique(asked, return_inverse=True)
    return {
        "roots": trees.roots.astype(np.int32),
        "to_right": _small(trees.right - nodes),
        "question": _small(number),
        "value": trees.value[~inner].astype(VALUE),
    } | {name: questions[name] for name in _QUESTION}


def _small(counts: NDArray[np.int64]) -> NDArray[Any]:
    """In the least type that holds them."""
    return counts.astype(np.min_scalar_type(counts.max(initial=0)))


def unpack(tables: Mapping[str, NDArray[Any]], names: tuple[str, ...], depth: int, base: float) -> Trees:
    """The trees again."""
    to_right = tables["to_right"].astype(np.int64)
    nodes, inner = np.arange(len(to_right)), to_right > 0

    def spread(of_some: NDArray[Any], where: NDArray[np.bool_], kind: type[np.generic]) -> NDArray[Any]:
        """A column of all nodes, zero for the others."""
        column = np.zeros(len(nodes), kind)
        column[where] = of_some
        return column

    def asked(name: str, kind: type[np.generic]) -> NDArray[Any]:
        return spread(tables[name][tables["question"]], inner, kind)

    return Trees(
        names,
        roots=tables["roots"].astype(np.int64),
        feature=asked("feature", np.int64),
        threshold=asked("threshold", np.float64),
        missing_left=asked("missing_left", np.bool_),
        left=nodes + inner,
        right=nodes + to_right,
        value=spread(tables["value"], ~inner, np.float64),
        depth=depth,
        base=base,
    )
