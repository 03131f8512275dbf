"""Times that are none: a launch that the CPU was late with, taken for a kernel's time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from evoattn.cost.cost import physical_part
from evoattn.cost.fitted import load
from evoattn.model.space import config_id
from scripts.cost.row import Row

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


def without_late(rows: Sequence[Row]) -> list[Row]:
    """The rows but those whose time is a late launch."""
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
    problems = _groups(rows, lambda row: (row.source, row.gpu.name, row.problem))
    kernels = _groups(rows, _kernel)
    expected = np.zeros(len(rows))
    for _ in range(MEDIANS):
        for groups in (problems, kernels):
            left = logs - expected
            for group in groups:
                expected[group] += np.median(left[group])
    usual: NDArray[np.float64] = np.exp(expected)
    return usual


def _groups(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> list[list[int]]:
    groups = defaultdict(list)
    for i, row in enumerate(rows):
        groups[key(row)].append(i)
    return list(groups.values())


def _far(us: float, expected: float) -> bool:
    alone = us >= ALONE_FROM_US and us < expected + MOST_US
    return us > (FAR_OFF_ALONE if alone else FAR_OFF) * expected and us > expected + LEAST_US


def _beyond_physics(row: Row) -> bool:
    part = physical_part(row.problem, row.config, row.gpu, row.registers, load())
    return part is not None and _far(row.us, part.us)
