"""What the cost model's scores are multiplied by on a card that its owner has calibrated: the sum of trees of each
family, and what single kernels differ from these by, fitted to times that were measured on it (`correction_fit.py`).

Only the order of kernels of one problem is corrected. Reading a correction imports no NumPy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from evoattn.model.gpu_table import GpuSpec
from evoattn.model.paths import FILE, calibration_folder
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

if TYPE_CHECKING:
    from evoattn.cost.fitted import Trees

MOST = 1.0
"""Natural logarithm of a correction, at most."""
DEEPEST = 64
"""Levels of a tree of a file."""
DIGITS = 5
"""Of a sum without leaves, in a file."""
NAME = 16
"""Digits of a config's id by which its kernel is known."""
ANYWHERE = "anywhere"
"""In place of a class of problems: for kernels that were timed on other classes alone."""


@dataclass(frozen=True)
class Correction:
    """`rows`: of each family the columns of its trees, JSON-ready (`row_of`); none where they did not choose better
    on problems left out. Their sum is the natural logarithm of what a score is multiplied by, at most MOST."""

    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of all problems, by kind and by the family of the fastest kernel: how many were left out, and the time of the
    first choice over the best, geometric mean, without the correction and with it."""
    kernels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By class of problems (`class_of`), of kernels that were timed on such, and of all that were timed ANYWHERE: what
    their scores are multiplied by beside the trees, its natural logarithm, by `name_of`."""

    def timed(self, problem: AttentionProblem) -> Mapping[str, float]:
        """Of `kernels` those of the problem's class."""
        return self.kernels.get(class_of(problem), {}) if self.kernels else {}

    def to_row(self) -> dict[str, Any]:
        """JSON-ready."""
        trees = {family: dict(row) for family, row in self.rows.items()}
        left_out = {kind: list(found) for kind, found in self.left_out.items()}
        kernels = {name: dict(found) for name, found in self.kernels.items()}
        return {"trees": trees, "left_out": left_out, "kernels": kernels}

    @cached_property
    def trees(self) -> Mapping[str, Trees]:
        """By family."""
        import numpy as np

        from evoattn.cost.fitted import COLUMNS, Trees

        found = {}
        for family, row in self.rows.items():
            columns = {name: np.array(row[name]) for name in COLUMNS}
            found[family] = Trees.of_columns(columns, tuple(row["names"]), row["depth"], row["base"])
        return found


NONE = Correction()


def class_of(problem: AttentionProblem) -> str:
    """Problems on which a kernel differs alike from what trees say of it: bits, head_dims, whether a mask ends at a
    diagonal; e.g. `16 d64 dv64 causal`."""
    dims = f"d{problem.head_dim} dv{problem.head_dim_v}"
    return f"{8 * problem.element_bytes} {dims}{' causal' if problem.causal else ''}"


def name_of(config: KernelConfig) -> str:
    """A kernel's name in a file."""
    return config.id[:NAME]


def row_of(trees: Trees) -> dict[str, Any]:
    """A family's trees as plain data."""
    columns = trees.columns()
    found: dict[str, Any] = {"names": list(trees.names), "depth": trees.depth, "base": round(trees.base, DIGITS)}
    found |= {name: column.tolist() for name, column in columns.items()}
    found["threshold"] = [float(str(threshold)) for threshold in columns["threshold"]]  # the shortest that say it
    return found


_put: dict[GpuSpec, Correction] = {}


def put(gpu: GpuSpec, found: Correction) -> None:
    """Have this process, and those that it forks, take a correction that no file has yet."""
    _put[gpu] = found
    correction_of.cache_clear()


def forget() -> None:
    """Read the files anew."""
    _put.clear()
    correction_of.cache_clear()


@cache
def correction_of(gpu: GpuSpec) -> Correction:
    """What a calibration of the card found; none where there is none, or its file says something else."""
    if gpu in _put:
        return _put[gpu]
    try:
        row = json.loads((calibration_folder(gpu) / FILE).read_text(encoding="utf-8"))
        return of_row(row["correction"])
    except (OSError, ValueError, KeyError, TypeError):
        return NONE


def of_row(row: Any) -> Correction:
    """Of what a file says. Raises `ValueError` where those are no trees, or a walk would leave its tree."""
    names = ("trees", "left_out", "kernels")
    trees, left_out, kernels = (row.get(name) if isinstance(row, dict) else None for name in names)
    if not isinstance(trees, dict) or not all(isinstance(one, dict) and _are_trees(one) for one in trees.values()):
        raise ValueError("a correction is no table of trees")
    if not isinstance(left_out, dict) or not all(_are_numbers(found, 3) for found in left_out.values()):
        raise ValueError("a correction does not say how good it is")
    if not isinstance(kernels, dict) or not all(
        isinstance(one, dict) and _are_numbers(list(one.values()), len(one)) for one in kernels.values()
    ):
        raise ValueError("a correction of kernels is no number")
    within = {name: {k: max(-MOST, min(MOST, log)) for k, log in one.items()} for name, one in kernels.items()}
    return Correction(trees, left_out, within)


def _are_trees(row: Mapping[str, Any]) -> bool:
    lists: list[Any] = [row.get(name) for name in ("names", "inner", "feature")]
    if not all(isinstance(found, list) for found in lists):
        return False
    names, nodes, features = lists
    if not all(isinstance(inner, bool) for inner in nodes) or not _are_whole(nodes):
        return False
    inner, asked = sum(nodes), len(features)
    return (
        all(isinstance(name, str) for name in names)
        and _all_below(row.get("question"), asked, inner)
        and _all_below(features, len(names))
        and _are_numbers(row.get("value"), len(nodes) - inner)
        and _are_numbers(row.get("threshold"), asked)
        and _are_numbers(row.get("missing_left"), asked)
        and _all_below([row.get("depth")], DEEPEST)
        and _are_numbers([row.get("base")], 1)
    )


def _are_whole(nodes: list[bool]) -> bool:
    """Whether the last of these trees has both sides of each inner node."""
    to_come = 0
    for inner in nodes:
        to_come = max(to_come, 1) + (1 if inner else -1)
    return to_come == 0


def _all_below(found: Any, most: int, count: int | None = None) -> bool:
    """Whether it is a list of whole numbers from 0 on, of so many."""
    if not isinstance(found, list) or (count is not None and len(found) != count):
        return False
    return all(type(n) is int and 0 <= n < most for n in found)


def _are_numbers(found: Any, count: int) -> bool:
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(isinstance(x, (int, float)) and math.isfinite(x) for x in found)
