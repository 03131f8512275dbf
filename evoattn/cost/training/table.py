"""What the fit needs of measured rows, computed once: the physical terms without their weights, and the features."""

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.features import LEAST, fixed_features
from evoattn.cost.fitted import Weights
from evoattn.cost.physics import BESIDE, FLOOR, OVERLAPPED_SHARE, PARTS, UNITS, LaunchTerms, Physics, launch_terms
from evoattn.cost.training.rows import Row
from evoattn.families import registry

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
BUSY, TERMS = (*UNITS, "dram"), PARTS[:-1]
"""Columns of a term table; `PARTS` are those of the parts of a physical time."""
CHUNK = 2000
"""Rows that a process is given at once."""
Described = tuple[Floats, Floats, float, dict[str, float]]
"""Of a row: terms [launch, term] in µs, shares [launch] of a launch's fixed time, least µs of memory, features."""


def unknown_registers(row: Row) -> bool:
    """A third of the rows are fitted with the family's own estimate of registers, as before a compile."""
    return hash((row.config.params.get("BLOCK_M"), row.us)) % 3 == 0


def _describe(row: Row, estimate: bool) -> Described | None:
    works = registry.lookup(row.family).work(row.problem, row.config, 0 if estimate else row.registers)
    found = []
    for work in works:
        one = launch_terms(work, row.gpu)
        if one is None:
            return None
        found.append(one)
    terms = np.array([_in_us(one, row) for one in found])
    shares = np.array([OVERLAPPED_SHARE if work.overlaps else 1.0 for work in works])
    memory = sum(one.least_dram_bytes for one in found) / row.gpu.dram_gb_per_s / 1e3
    plain = Physics(works, tuple(found), 1.0, {}, memory)
    return terms, shares, memory, fixed_features(row.problem, row.config, plain, row.gpu, row.spill_bytes)


def _in_us(found: LaunchTerms, row: Row) -> list[float]:
    us = 1e-3 / row.gpu.boost_clock_ghz
    dram = found.dram_bytes / row.gpu.dram_gb_per_s / 1e3
    return [*(found.units[n] * us for n in UNITS), dram, found.chain * us, found.fetch * us, found.ends * us]


@dataclass(frozen=True)
class _Chunk:
    """Some rows' fits, terms, shares and memory, and by family their places among them, names and features."""

    fits: NDArray[np.bool_]
    terms: Floats
    shares: Floats
    memory_us: Floats
    features: dict[str, tuple[Numbers, tuple[str, ...], Floats]]


def _describe_all(rows: Sequence[Row], estimate: Callable[[Row], bool]) -> _Chunk:
    described = [_describe(row, estimate(row)) for row in rows]
    count, launches = len(rows), max((len(found[1]) for found in described if found), default=0)
    terms, shares = np.zeros((count, launches, len(TERMS))), np.zeros((count, launches))
    fits, memory = np.zeros(count, np.bool_), np.zeros(count)
    asked: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
    for i, found in enumerate(described):
        if found:
            fits[i], mine = True, slice(len(found[1]))
            terms[i, mine], shares[i, mine], memory[i], own = found
            asked[rows[i].family].append((i, own))
    features = {}
    for family, known in asked.items():
        names = tuple(sorted({name for _, own in known for name in own}))
        values = np.array([[own.get(name, math.nan) for name in names] for _, own in known])
        features[family] = np.array([i for i, _ in known]), names, values
    return _Chunk(fits, terms, shares, memory, features)


@dataclass(frozen=True)
class Table:
    """Rows and what is known of each. `features` are by family: their names, and [row of the family, feature]."""

    rows: Sequence[Row]
    us: Floats
    fits: NDArray[np.bool_]
    """Whether a block of the row's kernel fits on an SM."""
    family: NDArray[np.str_]
    terms: Floats
    shares: Floats
    memory_us: Floats
    place: Numbers
    """Of a row in the table of its family's features."""
    features: dict[str, tuple[tuple[str, ...], Floats]]

    def physical(self, chosen: Numbers, weights: dict[str, Weights]) -> tuple[Floats, Floats]:
        """(µs [row], parts [row, part] in µs) of these rows, as `evoattn.cost.physics.physics` has them."""
        each = np.zeros((len(chosen), 4))
        units = np.zeros((len(chosen), len(BUSY)))
        for family in set(self.family[chosen]):
            mine, found = self.family[chosen] == family, weights[registry.weighed_as(family)]
            each[mine] = found.chain, found.fetch, found.ends, found.launch_us
            units[mine] = [found.units[name] for name in BUSY]
        return put_together(self.terms[chosen], self.shares[chosen], units, each)

    def asked(self, family: str, chosen: Numbers, us: Floats, parts: Floats) -> tuple[tuple[str, ...], Floats]:
        """Names of the features of a family, and these of its rows."""
        names, table = self.features[family]
        shares = np.log(np.maximum(parts, LEAST) / us[:, None])
        names = (*names, *(f"{part} share" for part in PARTS), "log us")
        return names, np.concatenate([table[self.place[chosen]], shares, np.log(us)[:, None]], 1)

    def bounded(self, chosen: Numbers, us: Floats) -> Floats:
        """As `Physics.corrected`: never below what memory takes. Infinite where no block fits."""
        least = np.maximum(self.memory_us[chosen], 1e-9)
        found = np.power(np.power(us / least, FLOOR) + 1.0, 1 / FLOOR) * least
        bounded: Floats = np.where(self.fits[chosen], found, math.inf)
        return bounded


def put_together(terms: Floats, shares: Floats, units: Floats, each: Floats) -> tuple[Floats, Floats]:
    """(µs [row], parts [row, part]) of terms [row, launch, term] with the weights of units [row, unit] and those of
    chain, fetch, ends and launch [row, 4]."""
    busy = len(BUSY)
    weighed = np.concatenate(
        [
            terms[:, :, :busy] * units[:, None],
            terms[:, :, busy:] * each[:, None, :3],
            shares[:, :, None] * each[:, None, 3:],
        ],
        axis=2,
    )
    waits = weighed[:, :, busy] + weighed[:, :, busy + 1]
    beside = ((weighed[:, :, :busy] ** BESIDE).sum(2) + waits**BESIDE) ** (1 / BESIDE)
    return (beside + weighed[:, :, busy + 2] + weighed[:, :, busy + 3]).sum(1), weighed.sum(1)


def _never(row: Row) -> bool:
    return False


def _always(row: Row) -> bool:
    return True


REGISTERS = {"compiler": _never, "estimate": _always, "both": unknown_registers}
"""Whose registers a table has: `both` as the fit."""


def make_table(rows: Sequence[Row], registers: str = "compiler", jobs: int = 1) -> Table:
    """The table of these rows, by `jobs` processes."""
    parts = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
    estimates = [REGISTERS[registers]] * len(parts)
    if jobs > 1:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            chunks = list(pool.map(_describe_all, parts, estimates))
    else:
        chunks = list(map(_describe_all, parts, estimates))
    place, features = np.zeros(len(rows), np.int64), {}
    for family in sorted({row.family for row in rows}):
        own = [(CHUNK * i, *chunk.features[family]) for i, chunk in enumerate(chunks) if family in chunk.features]
        names = tuple(sorted({name for _, _, some, _ in own for name in some}))
        if own:
            chosen = np.concatenate([first + among for first, among, _, _ in own])
            place[chosen] = np.arange(len(chosen))
            features[family] = names, np.concatenate([columns(values, some, names) for _, _, some, values in own])
    return Table(
        rows, np.array([row.us for row in rows]), np.concatenate([chunk.fits for chunk in chunks]),
        np.array([row.family for row in rows]), _one_table([chunk.terms for chunk in chunks]),
        _one_table([chunk.shares for chunk in chunks]), np.concatenate([chunk.memory_us for chunk in chunks]),
        place, features,
    )  # fmt: skip


def _one_table(tables: Sequence[Floats]) -> Floats:
    """Tables [row, launch, …] one below another: zeros where a table's rows have fewer launches than another's."""
    most = max(table.shape[1] for table in tables)
    below = [np.pad(t, [(0, 0), (0, most - t.shape[1]), *[(0, 0)] * (t.ndim - 2)]) for t in tables]
    return np.concatenate(below)


def columns(table: Floats, names: Sequence[str], wanted: Sequence[str]) -> Floats:
    """The wanted columns of a table whose columns have these names: not a number where it has none."""
    places = {name: i for i, name in enumerate(names)}
    missing = np.full(len(table), math.nan)
    return np.stack([table[:, places[name]] if name in places else missing for name in wanted], axis=1)
