"""Landscapes: the recorded times of many configs, good and bad, on a few problems.

Those of the repository are columns in `reports/measurements/landscapes.npz` (`evoattn/cost/measurements.py`); half of
their kernels are random. A campaign is read as landscapes, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from evoattn.cost import measurements
from evoattn.cost.measurements import LANDSCAPES, Campaign
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import DetectedDevice, lookup
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, config_id

COMPILE_SECONDS = 0.6
"""Of a kernel, where no file says."""
COMMON = 3
"""Kernels that two files time on a problem, from which on their boards are compared."""


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

    def times(self, ratio: float) -> Config:
        """As on a board that takes `ratio` times as long."""
        us, again = (None if t is None else t * ratio for t in (self.us, self.again))
        return self if ratio == 1.0 else replace(self, us=us, again=again)


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


def files() -> list[Path]:
    """The recordings of the repository, as `load` takes them; an installed package has none."""
    return [LANDSCAPES / name for name in measurements.names(LANDSCAPES)] if LANDSCAPES.exists() else []


def load(*paths: Path) -> list[Landscape]:
    """The landscapes of some recordings or campaigns (`measurements.recorded`), one per problem of which a kernel was
    timed, in the order in which the files have them.

    A problem that several files have is one landscape: its group has one name, and the same problems at the same
    indexes, in all of them. Boards differ: what an earlier file has of a problem is multiplied by the median ratio of
    the times of the kernels that a later one timed again (`COMMON` at least). Genes that an earlier file lacks have
    their default values. Raises `ValueError` where two files time different problems at one index of a group, or a
    campaign's card is none of the table.
    """
    found: dict[Place, list[_Part]] = {}
    genes: dict[str, dict[str, tuple[Any, ...]]] = {}
    gpu, numbers = "", itertools.count()
    for path in paths:
        recorded = _whole(measurements.recorded(path))
        about = {name: said for name, said in recorded.about.items() if name != "genes"}
        genes |= {family: {name: tuple(v) for name, v in g.items()} for family, g in recorded.about["genes"].items()}
        gpu, waits = about["gpu"], _compile_seconds(recorded)
        for group in recorded.groups:
            parts = [_Part(AttentionProblem(**fields), about) for fields in group["problems"]]
            for i, part in enumerate(parts):
                found.setdefault((group["group"], i), []).append(part)
            for kernel in group["kernels"]:
                number = next(numbers)
                for i, part in enumerate(parts):
                    part.put(_config(kernel, number, i, waits), i in kernel["valid"])
    defaults = _defaults(genes, gpu) if len(paths) > 1 else {}
    made = []
    for (name, i), places in found.items():
        if timed := [part for part in places if part.configs or part.elsewhere]:
            problem, about = timed[0].problem, timed[0].about
            if any(part.problem != problem for part in timed):
                raise ValueError(f"The files time different problems of {name!r} at index {i}.")
            made.append(Landscape(name, i, problem, about, genes, *_together(timed, defaults)))
    return made


def _whole(recorded: Campaign) -> Campaign:
    """With what a landscape has and a campaign lacks: the card's name, genes, and of each kernel seconds, for which
    problems a search could propose it, and no second times."""
    if "genes" in recorded.about:
        return recorded
    gpu = DetectedDevice(0, recorded.about["device"], (0, 0), "").spec
    if gpu is None:
        raise ValueError(f"no card of the table is called {recorded.about['device']}")
    groups = []
    for group in recorded.groups:
        problems = [AttentionProblem(**fields) for fields in group["problems"]]
        kernels = []
        for kernel in group["kernels"]:
            family = registry.lookup(kernel["family"])
            params = registry.completed(family.name, kernel["params"])
            made = KernelConfig(family.name, params)
            valid = [i for i, problem in enumerate(problems) if not family.why_invalid(problem, made, gpu)]
            seconds = {"compile_s": kernel.get("compile_seconds", 0.0), "device_s": kernel.get("device_seconds", 0.0)}
            kernels.append(kernel | seconds | {"params": params, "valid": valid, "again": {}})
        groups.append(group | {"kernels": kernels})
    families = {kernel["family"] for group in groups for kernel in group["kernels"]}
    genes = {f: {p.name: list(p.values) for p in load_space(f, gpu).parameters} for f in sorted(families)}
    return Campaign(recorded.name, recorded.about | {"gpu": gpu.name, "genes": genes}, groups)


Place = tuple[str, int]
"""A group's name, and a problem's index in it."""


@dataclass
class _Part:
    """What one file has of a problem."""

    problem: AttentionProblem
    about: dict[str, Any]
    configs: list[Config] = field(default_factory=list)
    elsewhere: list[Config] = field(default_factory=list)

    def put(self, config: Config, valid: bool) -> None:
        """Add a config, `valid` where a search could propose it."""
        if valid:
            self.configs.append(config)
        elif config.us is not None:
            self.elsewhere.append(config)


def _compile_seconds(recorded: Campaign) -> dict[str, float]:
    """By family, in the median: of kernels whose machine code was there, what a compile would have taken."""
    known: dict[str, list[float]] = {}
    for kernel in (kernel for group in recorded.groups for kernel in group["kernels"]):
        if kernel["compile_s"]:
            known.setdefault(kernel["family"], []).append(kernel["compile_s"])
    return {family: median(seconds) for family, seconds in known.items()}


def _defaults(genes: dict[str, dict[str, tuple[Any, ...]]], gpu: str) -> dict[str, dict[str, Any]]:
    """By family, of the genes that have a default."""
    spaces = {family: load_space(family, lookup(gpu)) for family in genes}
    return {f: {p.name: p.default for p in s.parameters if p.default is not None} for f, s in spaces.items()}


def _together(parts: list[_Part], defaults: dict[str, dict[str, Any]]) -> tuple[tuple[Config, ...], tuple[Config, ...]]:
    """The configs of all parts, at the speed of the last one's board; of a kernel that several have the last."""
    configs: dict[str, Config] = {}
    elsewhere: dict[str, Config] = {}
    for part in parts:
        fresh = _by_id(part.configs, defaults)
        ratio = _ratio(configs, fresh)
        configs = {name: c.times(ratio) for name, c in configs.items()} | fresh
        elsewhere = {name: c.times(ratio) for name, c in elsewhere.items()} | _by_id(part.elsewhere, defaults)
    return tuple(configs.values()), tuple(c for name, c in elsewhere.items() if name not in configs)


def _by_id(configs: Iterable[Config], defaults: dict[str, dict[str, Any]]) -> dict[str, Config]:
    whole = (replace(c, params=defaults.get(c.family, {}) | c.params) for c in configs)
    return {config_id(c.family, c.params): c for c in whole}


def _ratio(earlier: dict[str, Config], later: dict[str, Config]) -> float:
    """The median of later over earlier times of the same kernels; 1 where fewer than `COMMON` have both."""
    both = [(earlier[name].best_us, later[name].best_us) for name in earlier.keys() & later.keys()]
    ratios = [new / old for old, new in both if old and new]
    return median(ratios) if len(ratios) >= COMMON else 1.0


def _config(kernel: dict[str, Any], number: int, index: int, waits: dict[str, float]) -> Config:
    """A kernel on the problem of this index."""
    times, family = kernel["times"], kernel["family"]
    return Config(
        number,
        family,
        kernel["params"],
        kernel["state"],
        kernel["origin"],
        times.get(str(index)) if kernel["state"] == "right" else None,
        index in kernel["rough"],
        kernel["registers"],
        kernel["spill_bytes"],
        kernel["compile_s"] or waits.get(family, COMPILE_SECONDS),
        kernel["device_s"] / max(1, len(times)),
        kernel["again"].get(str(index)),
    )
