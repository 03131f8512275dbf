"""The measured times of campaigns, in columns: one file a card, `reports/measurements/CARD.npz`.

Its README says what each column is. What is read is what was written, but for how long a kernel took to compile.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.model.paths import ROOT
from evoattn.model.space import config_id

FOLDER = ROOT / "reports" / "measurements"
NONE = -1
"""In place of a number that is not there."""
Numbers = NDArray[np.int64]
KERNEL = ("config", "origin", "state")
"""The words of a kernel; each column has the places of its words in a table of the same name."""


@dataclass(frozen=True)
class Campaign:
    """What a campaign's file holds (`evoattn/portfolio/campaign.py`): its name, what is said about it, its groups."""

    name: str
    about: dict[str, Any]
    groups: list[dict[str, Any]]


def files() -> list[Path]:
    """One a card."""
    return sorted(FOLDER.glob("*.npz"))


@cache
def read(path: Path) -> tuple[Campaign, ...]:
    """All campaigns of the card, by name. They are shared: change none of them."""
    with np.load(path) as stored:
        columns = {name: stored[name] for name in stored.files}
    tables = {name: _lines(columns[f"{name} table"]) for name in ("campaign", "group", "problem", *KERNEL)}
    return tuple(_campaigns(columns, tables))


def names(path: Path) -> list[str]:
    """Of the card's campaigns, in order; in a hundredth of the time of `read`."""
    with np.load(path) as stored:
        return [json.loads(line)[0] for line in _lines(stored["campaign table"])]


def campaign(path: Path, name: str) -> Campaign:
    """The campaign of this name. Raises `KeyError` where the file has none."""
    return {one.name: one for one in read(path)}[name]


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
class _Words:
    """Each word once, in the order in which they came."""

    places: dict[str, int] = field(default_factory=dict)

    def place(self, value: Any) -> int:
        return self.places.setdefault(json.dumps(value, separators=(",", ":")), len(self.places))

    def stored(self) -> NDArray[np.uint8]:
        return np.frombuffer("\n".join(self.places).encode(), np.uint8)


def _lines(stored: NDArray[np.uint8]) -> list[str]:
    return stored.tobytes().decode().split("\n") if len(stored) else []


def _nanoseconds(us: float | None) -> int:
    return NONE if us is None else round(us * 1e3)


def _columns(campaigns: Iterable[Campaign]) -> dict[str, NDArray[Any]]:
    words = {name: _Words() for name in ("campaign", "group", "problem", *KERNEL)}
    rows: dict[str, list[int]] = {
        name: []
        for name in (
            "group of campaign", "group name", "problems of group", "problem", "kernels of group", *KERNEL,
            "registers", "spill bytes", "times of kernel", "time problem", "time ns", "time rough",
            "finals of group", "final kernel",
        )
    }  # fmt: skip
    finals: list[float] = []
    for one in campaigns:
        place = words["campaign"].place([one.name, one.about])
        for group in one.groups:
            rows["group of campaign"].append(place)
            more = {k: v for k, v in (group["final"] or {}).items() if k not in ("kernels", "us")}
            rows["group name"].append(words["group"].place([group["group"], more]))
            rows["problems of group"].append(len(group["problems"]))
            rows["problem"] += [words["problem"].place(problem) for problem in group["problems"]]
            finals += _put_kernels(rows, words, group)
    narrow = {name: _narrow(np.array(column, np.int64)) for name, column in rows.items()}
    narrow["final us"] = np.array(finals)
    return narrow | {f"{name} table": table.stored() for name, table in words.items()}


def _put_kernels(rows: dict[str, list[int]], words: dict[str, _Words], group: dict[str, Any]) -> Iterator[float]:
    rows["kernels of group"].append(len(group["kernels"]))
    for kernel in group["kernels"]:
        family, params = kernel["family"], kernel["params"]
        rows["config"].append(words["config"].place([family, params]))
        for name in KERNEL[1:]:
            rows[name].append(words[name].place(kernel[name]))
        rows["registers"].append(kernel["registers"])
        rows["spill bytes"].append(kernel["spill_bytes"])
        rough = set(kernel["rough"])
        times = {int(index): us for index, us in kernel["times"].items()}
        timed = [*times, *sorted(rough - set(times))]
        rows["times of kernel"].append(len(timed))
        rows["time problem"] += timed
        rows["time ns"] += [_nanoseconds(times.get(index)) for index in timed]
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


def _campaigns(columns: dict[str, NDArray[Any]], tables: dict[str, list[str]]) -> Iterator[Campaign]:
    known = {name: [json.loads(line) for line in table] for name, table in tables.items()}
    found = [Campaign(name, about, []) for name, about in known["campaign"]]
    taken = dict.fromkeys(columns, 0)

    def take(name: str, count: int = 1) -> list[Any]:
        first = taken[name]
        taken[name] += count
        values: list[Any] = columns[name][first : first + count].tolist()
        return values

    for place in columns["group of campaign"].tolist():
        name, more = known["group"][take("group name")[0]]
        problems = [dict(known["problem"][i]) for i in take("problem", take("problems of group")[0])]
        kernels = []
        for _ in range(take("kernels of group")[0]):
            (family, params), *others = (known[word][take(word)[0]] for word in KERNEL)
            count = take("times of kernel")[0]
            timed = list(
                zip(take("time problem", count), take("time ns", count), take("time rough", count), strict=True)
            )
            kernels.append(
                dict(zip(KERNEL[1:], others, strict=True))
                | {"family": family, "params": dict(params), "id": config_id(family, params)}
                | {"registers": take("registers")[0], "spill_bytes": take("spill bytes")[0]}
                | {"times": {str(i): ns / 1e3 for i, ns, _ in timed if ns != NONE}}
                | {"rough": sorted(i for i, _, rough in timed if rough)}
            )
        table, count = None, take("finals of group")[0]
        if count != NONE:
            names = [kernels[i]["id"] for i in take("final kernel", count)]
            table = {
                "kernels": names,
                "us": [[None if us != us else us for us in take("final us", count)] for _ in problems],
            }
            table |= more
        found[place].groups.append({"group": name, "problems": problems, "kernels": kernels, "final": table})
    yield from found
