"""The measured times of campaigns, in columns: one file a card, `reports/measurements/CARD.npz`. One more has
landscapes, the times of many configs, good and bad, on a few problems: they are read only, and say more of each kernel.

Its README says what each column is. What is read is what was written, but for how long a kernel took to compile."""

import gzip
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.model.paths import ROOT
from evoattn.model.space import config_id

FOLDER = ROOT / "reports" / "measurements"
LANDSCAPES = FOLDER / "landscapes.npz"
NONE = -1
"""In place of a number that is not there."""
Numbers = NDArray[np.int64]
KERNEL = ("config", "origin", "state")
"""Columns of a kernel that have the places of values in a table of the same name."""
PER_US = {"ns": 1000, "0.1 ns": 10_000}
"""Units of times: a file has the first in which all of its times are whole."""


@dataclass(frozen=True)
class Campaign:
    """What a campaign's file holds (`evoattn/portfolio/campaign.py`): its name, what is said about it, its groups."""

    name: str
    about: dict[str, Any]
    groups: list[dict[str, Any]]


def files() -> list[Path]:
    """One a card."""
    return sorted(path for path in FOLDER.glob("*.npz") if path != LANDSCAPES)


@cache
def read(path: Path) -> tuple[Campaign, ...]:
    """All campaigns of the card, by name. They are shared: change none of them."""
    with np.load(path) as stored:
        return tuple(_Reader({name: stored[name] for name in stored.files}).campaigns())


def names(path: Path) -> list[str]:
    """Of the card's campaigns, in order; in a hundredth of the time of `read`."""
    with np.load(path) as stored:
        return [json.loads(line)[0] for line in _lines(stored["campaign table"])]


def campaign(path: Path, name: str) -> Campaign:
    """The campaign of this name. Raises `KeyError` where the file has none."""
    return {one.name: one for one in read(path)}[name]


def recorded(path: Path) -> Campaign:
    """What `reports/measurements/CARD.npz/NAME` names, or what `evoattn portfolio measure` wrote to a file. Raises
    `OSError`, `EOFError`, `KeyError` or `ValueError` where it cannot be read."""
    if path.parent.suffix == ".npz":
        return campaign(path.parent, path.name)
    with gzip.open(path, "rt") as file:
        about, *groups = [json.loads(line) for line in file]
    return Campaign(path.name.removesuffix(".jsonl.gz"), about, groups)


def append(path: Path, new: Iterable[Campaign]) -> None:
    """Add campaigns to a card's file, in place of those of the same name; the file is put in place whole."""
    known = {one.name: one for one in read(path)} if path.exists() else {}
    known |= {one.name: one for one in new}
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as file:
        for name, column in _columns([known[name] for name in sorted(known)]).items():
            with file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, column, allow_pickle=False)
    part.replace(path)
    read.cache_clear()


@dataclass
class _Table:
    """Each value once, in the order in which they came."""

    places: dict[str, int] = field(default_factory=dict)

    def place(self, value: Any) -> int:
        return self.places.setdefault(json.dumps(value, separators=(",", ":")), len(self.places))

    def stored(self) -> NDArray[np.uint8]:
        return np.frombuffer("\n".join(self.places).encode(), np.uint8)


def _lines(stored: NDArray[np.uint8]) -> list[str]:
    return stored.tobytes().decode().split("\n") if len(stored) else []


def _unit(campaigns: Iterable[Campaign]) -> str:
    times = (us for one in campaigns for group in one.groups for k in group["kernels"] for us in k["times"].values())
    return "ns" if all(abs(us * 1e3 - round(us * 1e3)) < 1e-3 for us in times) else "0.1 ns"


def _ticks(us: float | None, unit: str) -> int:
    return NONE if us is None else round(us * PER_US[unit])


def _columns(campaigns: Sequence[Campaign]) -> dict[str, NDArray[Any]]:
    unit = _unit(campaigns)
    tables = {name: _Table() for name in ("campaign", "group", "problem", *KERNEL)}
    rows: dict[str, list[int]] = {
        name: []
        for name in (
            "group of campaign", "group name", "problems of group", "problem", "kernels of group", *KERNEL,
            "registers", "spill bytes", "times of kernel", "time problem", f"time {unit}", "time rough",
            "finals of group", "final kernel",
        )
    }  # fmt: skip
    finals: list[float] = []
    for one in campaigns:
        place = tables["campaign"].place([one.name, one.about])
        for group in one.groups:
            rows["group of campaign"].append(place)
            more = {k: v for k, v in (group["final"] or {}).items() if k not in ("kernels", "us")}
            rows["group name"].append(tables["group"].place([group["group"], more]))
            rows["problems of group"].append(len(group["problems"]))
            rows["problem"] += [tables["problem"].place(problem) for problem in group["problems"]]
            finals += _put_kernels(rows, tables, group, unit)
    narrow = {name: _narrow(np.array(column, np.int64)) for name, column in rows.items()}
    narrow["final us"] = np.array(finals)
    return narrow | {f"{name} table": table.stored() for name, table in tables.items()}


def _put_kernels(
    rows: dict[str, list[int]], tables: dict[str, _Table], group: dict[str, Any], unit: str
) -> Iterator[float]:
    rows["kernels of group"].append(len(group["kernels"]))
    for kernel in group["kernels"]:
        family, params = kernel["family"], kernel["params"]
        rows["config"].append(tables["config"].place([family, params]))
        for name in KERNEL[1:]:
            rows[name].append(tables[name].place(kernel[name]))
        rows["registers"].append(kernel["registers"])
        rows["spill bytes"].append(kernel["spill_bytes"])
        rough = set(kernel["rough"])
        times = {int(index): us for index, us in kernel["times"].items()}
        timed = [*times, *sorted(rough - set(times))]
        rows["times of kernel"].append(len(timed))
        rows["time problem"] += timed
        rows[f"time {unit}"] += [_ticks(times.get(index), unit) for index in timed]
        rows["time rough"] += [index in rough for index in timed]
    final = group["final"]
    places = {kernel["id"]: i for i, kernel in enumerate(group["kernels"])}
    rows["finals of group"].append(len(final["kernels"]) if final else NONE)
    if final:
        rows["final kernel"] += [places[name] for name in final["kernels"]]
        yield from (np.nan if us is None else us for row in final["us"] for us in row)


def _narrow(column: Numbers) -> NDArray[Any]:
    """In the narrowest whole numbers that hold it."""
    least, most = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    kind = next(
        k for k in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(k).min <= least and most <= np.iinfo(k).max
    )
    return column.astype(kind)


class _Reader:
    """Columns, read from their beginnings on."""

    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self._columns, self._taken = columns, dict.fromkeys(columns, 0)
        self._unit = next(unit for unit in PER_US if f"time {unit}" in columns)
        self._tables = {
            name: [json.loads(line) for line in _lines(columns[f"{name} table"])]
            for name in ("campaign", "group", "problem", *KERNEL)
        }

    def campaigns(self) -> list[Campaign]:
        """All of them; to be asked once."""
        found = [Campaign(name, about, []) for name, about in self._tables["campaign"]]
        for place in self._columns["group of campaign"].tolist():
            found[place].groups.append(self._group())
        return found

    def _take(self, name: str, count: int) -> list[Any]:
        first = self._taken[name]
        self._taken[name] += count
        values: list[Any] = self._columns[name][first : first + count].tolist()
        return values

    def _one(self, name: str) -> Any:
        return self._take(name, 1)[0]

    def _group(self) -> dict[str, Any]:
        name, more = self._tables["group"][self._one("group name")]
        problems = [dict(self._tables["problem"][i]) for i in self._take("problem", self._one("problems of group"))]
        kernels = [self._kernel() for _ in range(self._one("kernels of group"))]
        table, count = None, self._one("finals of group")
        if count != NONE:
            names = [kernels[i]["id"] for i in self._take("final kernel", count)]
            us = [[None if us != us else us for us in self._take("final us", count)] for _ in problems]
            table = {"kernels": names, "us": us} | more
        return {"group": name, "problems": problems, "kernels": kernels, "final": table}

    def _kernel(self) -> dict[str, Any]:
        (family, params), *others = (self._tables[name][self._one(name)] for name in KERNEL)
        count = self._one("times of kernel")
        timed, rough = self._take("time problem", count), self._take("time rough", count)
        found = dict(zip(KERNEL[1:], others, strict=True)) | {
            "family": family,
            "params": dict(params),
            "id": config_id(family, params),
            "registers": self._one("registers"),
            "spill_bytes": self._one("spill bytes"),
            "times": self._us("time", timed),
            "rough": sorted(i for i, is_rough in zip(timed, rough, strict=True) if is_rough),
        }
        if "valid" in self._columns:
            valid = self._one("valid")
            found |= {
                "valid": [index for index in range(valid.bit_length()) if valid >> index & 1],
                "again": self._us("again", timed),
            }
        return found

    def _us(self, what: str, timed: list[int]) -> dict[str, float]:
        ticks = self._take(f"{what} {self._unit}", len(timed))
        return {str(i): n / PER_US[self._unit] for i, n in zip(timed, ticks, strict=True) if n != NONE}
