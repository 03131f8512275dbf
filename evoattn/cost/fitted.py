"""What was fitted to measured times: weights of the physical terms, and trees for what the terms leave over.

Plain numbers in `data/fitted.npz`; `evoattn cost fit` makes the file anew."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.trees import COLUMNS, Trees

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
