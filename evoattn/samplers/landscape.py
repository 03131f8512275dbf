"""Landscapes: the recorded times of many configs on a few problems, in one file.

The file is gzipped JSON, one row per line, in members that are appended: a recording that was cut short is whole up to
its last member. The first row is `{about, genes}`: card and versions, and the values of every gene by family. Then a
row per group of problems that share their kernels: `{group, problems}`. Then rows of kernels:

    kernel, of      its number, and its group's name
    family, params  the values stand in the order of `genes`
    origin          given, random, mutation or crossover
    state           `right`, or what failed, as `compile: …`, `launch: …`, `wrong: …`
    registers, spills             per thread, and bytes
    compile_s, device_s           seconds in a compile process (0: the machine code was there) and on the GPU
    us              µs per call by the problem's index in its group: the least of two runs of many calls
    rough           indexes whose time is one call's: far behind the best
    valid           indexes of the problems for which a search could propose the config

and `{kernel, again}`: µs measured a second time, of the fastest tenth of a problem.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoattn.model.problem import AttentionProblem

FILE = 1_000_000
"""Kernels of a second file are numbered from here."""


@dataclass(frozen=True)
class Config:
    """One recorded config on one problem. `us` is None where it failed."""

    number: int
    """Of its kernel."""
    family: str
    params: dict[str, Any]
    state: str
    origin: str
    us: float | None
    rough: bool
    registers: int
    spills: int
    compile_s: float
    device_s: float
    """On the GPU for this problem: its kernel's time there, divided by the problems that it was timed on."""
    again: float | None = None
    """µs of the second measurement."""

    @property
    def best_us(self) -> float | None:
        """The less of the two measurements."""
        return self.us if self.again is None or self.us is None else min(self.us, self.again)


@dataclass(frozen=True)
class Landscape:
    """What was recorded on one problem."""

    group: str
    index: int
    """Of the problem in its group."""
    problem: AttentionProblem
    about: dict[str, Any]
    genes: dict[str, dict[str, tuple[Any, ...]]]
    """{family: {gene: values}} at the time."""
    configs: tuple[Config, ...]
    """Those that a search of the problem could propose."""
    elsewhere: tuple[Config, ...]
    """Right configs that run here, but are redundant on this problem, so that no search would propose them."""

    @property
    def name(self) -> str:
        """Its group and its number there, for tables."""
        return f"{self.group} {self.index}"

    @property
    def best(self) -> float:
        """The least time in µs."""
        return min((c.best_us for c in self.configs if c.best_us is not None), default=math.inf)


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to the file, as one member."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    if text:
        with path.open("ab") as file:
            file.write(gzip.compress(text.encode(), 9))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of the whole members of a file."""
    data, text = path.read_bytes(), b""
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(data)
        except zlib.error:
            break
        if not member.eof:
            break
        text, data = text + part, member.unused_data
    return [json.loads(line) for line in text.splitlines()]


def load(*paths: Path) -> list[Landscape]:
    """The landscapes of some files, one per problem, in their order. A problem that several files have is one
    landscape: its group has one name and the same problems in all of them."""
    problems: dict[tuple[str, int], tuple[AttentionProblem, dict[str, Any]]] = {}
    found: dict[tuple[str, int], tuple[list[Config], list[Config]]] = {}
    genes: dict[str, dict[str, tuple[Any, ...]]] = {}
    for number, path in enumerate(paths):
        head, *rows = read_rows(path)
        genes |= {family: {name: tuple(v) for name, v in g.items()} for family, g in head["genes"].items()}
        again = {row["kernel"]: row["again"] for row in rows if "again" in row}
        for row in rows:
            if "group" in row:
                for i, fields in enumerate(row["problems"]):
                    problems.setdefault((row["group"], i), (AttentionProblem(**fields), head["about"]))
                    found.setdefault((row["group"], i), ([], []))
            elif "of" in row:
                params = dict(zip(genes[row["family"]], row["params"], strict=True))
                for index in range(sum(name == row["of"] for name, _ in problems)):
                    config = _config(row, number * FILE, params, str(index), again.get(row["kernel"], {}))
                    if index in row["valid"]:
                        found[row["of"], index][0].append(config)
                    elif config.us is not None:
                        found[row["of"], index][1].append(config)
    return [
        Landscape(name, i, problem, about, genes, tuple(found[name, i][0]), tuple(found[name, i][1]))
        for (name, i), (problem, about) in problems.items()
    ]


def _config(row: dict[str, Any], first: int, params: dict[str, Any], index: str, again: dict[str, float]) -> Config:
    right = row["state"] == "right"
    return Config(
        first + row["kernel"],
        row["family"],
        params,
        row["state"],
        row["origin"],
        row["us"].get(index) if right else None,
        int(index) in row["rough"],
        row["registers"],
        row["spills"],
        row["compile_s"],
        row["device_s"] / max(1, len(row["us"])),
        again.get(index),
    )
