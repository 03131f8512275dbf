"""A measured time, and of which kernel on which GPU; which of the measured times a fit is given."""

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.cost import physical_part
from evoattn.cost.fitted import load
from evoattn.families.flash_wgmma.resources import FlashWgmmaGenes, gang_size
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, config_id

LANDSCAPE_FOLD = 8
"""Landscapes are few, hold good and bad kernels alike, and all families."""
GANGS_SINCE = "2026-11-23"
"""Kernels whose blocks are gangs today (`evoattn/families/gangs.py`) had none in what was saved before."""
FAR_OFF, FAR_OFF_ALONE, LEAST_US, MOST_US = 8.0, 4.0, 50.0, 10_000.0
"""A time is late that is so many times what two others let expect, and more by so many µs than either: what the kernel
takes on its other problems, in medians, and the physical part of the cost model. A launch is late by 60 µs to 8 ms.
Times of `ALONE_FROM_US` and more may be one call's, late by at most `MOST_US`: of such, one in 400 is more than twice
the model's score for a kernel that it was fitted to, of shorter ones one in 10,000."""
ALONE_FROM_US = 300.0
MOST_LATE = 3
"""Late launches of a kernel in a source's times on a card. They come by chance: of 720,881 times 546 are late, three of
a kernel at most. A kernel with more such times is slow on some problems: one of split_kv takes 6 to 44 times what
the physical part says on prefills, on 4 to 6 of 27 to 96 problems."""
MEDIANS = 2
"""Rounds of medians over problems and kernels."""


@dataclass(frozen=True)
class Row:
    """One kernel timed on one problem."""

    gpu: GpuSpec
    problem: AttentionProblem
    config: KernelConfig
    registers: int
    spill_bytes: int
    us: float
    source: str
    """`campaign`: found by a search, so mostly good. `landscape`: good and bad alike."""
    saved: str = ""
    """The day on which it was saved, as 2026-11-23."""

    @property
    def family(self) -> str:
        return self.config.family


def without_late(rows: Sequence[Row]) -> list[Row]:
    """The rows but those whose time is that of a launch that the CPU was late with, not the kernel's."""
    expected = usual_us(rows)
    late = [_far(row.us, us) and _beyond_physics(row) for row, us in zip(rows, expected, strict=True)]
    times = Counter(_kernel(row) for row, is_late in zip(rows, late, strict=True) if is_late)
    return [row for row, is_late in zip(rows, late, strict=True) if not is_late or times[_kernel(row)] > MOST_LATE]


def _kernel(row: Row) -> tuple[str, str, str]:
    return row.source, row.gpu.name, config_id(row.family, row.config.params)


def usual_us(rows: Sequence[Row]) -> NDArray[np.float64]:
    """What each row's kernel and problem let expect: the median of the problem times the median factor of the kernel
    over such medians. That of a kernel with one time is this time."""
    logs = np.log([row.us for row in rows])
    problems = alike((row.source, row.gpu.name, row.problem) for row in rows)
    kernels = alike(map(_kernel, rows))
    expected = np.zeros(len(rows))
    for _ in range(MEDIANS):
        for groups in (problems, kernels):
            left = logs - expected
            for group in groups:
                expected[group] += np.median(left[group])
    usual: NDArray[np.float64] = np.exp(expected)
    return usual


def alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """Places of equal ones."""
    groups = defaultdict(list)
    for place, key in enumerate(keys):
        groups[key].append(place)
    return list(groups.values())


def _far(us: float, expected: float) -> bool:
    alone = us >= ALONE_FROM_US and us < expected + MOST_US
    return us > (FAR_OFF_ALONE if alone else FAR_OFF) * expected and us > expected + LEAST_US


def _beyond_physics(row: Row) -> bool:
    part = physical_part(row.problem, row.config, row.gpu, row.registers, load())
    return part is not None and _far(row.us, part.us)


def launched_as_today(rows: Iterable[Row]) -> list[Row]:
    """The rows but those of kernels that have gangs today and had none when they were timed."""
    return [row for row in rows if row.saved >= GANGS_SINCE or not _has_gangs(row)]


def _has_gangs(row: Row) -> bool:
    return row.family == "flash_wgmma" and gang_size(row.problem, FlashWgmmaGenes.of(row.config), row.gpu) > 1


def thinned(rows: Iterable[Row], most: int) -> list[Row]:
    """At most `most` rows of a problem of a campaign on a card, a third of them its fastest, the others at random; of a
    landscape `LANDSCAPE_FOLD` times as many."""
    rng = random.Random(0)
    groups: dict[tuple[str, str, AttentionProblem], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.gpu.name, row.problem].append(row)
    chosen = []
    for (source, *_), group in groups.items():
        group.sort(key=lambda row: row.us)
        each = most * (LANDSCAPE_FOLD if source == "landscape" else 1)
        chosen += group[: each // 3] + rng.sample(rest := group[each // 3 :], min(len(rest), each - each // 3))
    return chosen
