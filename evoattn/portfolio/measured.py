"""One group of problems as campaigns measured it: arrays of times and of work, and problems that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio import campaign
from evoattn.portfolio.engine.breeding import hopeless
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.features import class_of, features
from evoattn.portfolio.fit import Flags, Floats, Table, Usual, View, fit, usual
from evoattn.portfolio.known import known, visible
from evoattn.portfolio.likeness import scaled
from evoattn.portfolio.work import work_of

FEWEST = 30
"""Times of a kernel on one card from which on they tell how fast another is: of twelve times of an H200 and seventeen
of an H100 the factor came out as 0.2, where their clocks are alike."""
STUMBLE = 6.0
"""A time that is so many times what the kernel's constants say of it is none: of 10,519 of campaigns k and l 13 are, by
8 to 230, of calls that the CPU was late with; no other is more than 4 times. (`campaign.steady` is for those that a
search has timed, too.)"""
IMAGINED = 60
"""Problems at most that are imagined of a class."""


def resident_blocks(kernel: Kernel, group: Group, gpu: GpuSpec) -> int:
    """Blocks of the kernel that fit on one SM, by its registers and shared memory."""
    launch = registry.lookup(kernel.family).launches(group.problems[0], kernel.config, gpu)[0]
    return max(1, gpu.blocks_resident(kernel.registers, launch.threads, launch.smem_bytes))


@dataclass(frozen=True)
class Imagined:
    """Problems that were not measured, by the first view that a choice has of them: the sizes of their classes, and as
    in `fit.Table` their work and features; `served` [problems, kernels]."""

    sizes: list[str]
    work: Floats
    scaled: Floats
    served: Flags


@dataclass(frozen=True)
class Measured:
    """One group of the campaigns: its kernels, the sizes of its problems' classes, and its times."""

    kernels: list[Kernel]
    resident: list[int]
    sizes: list[str]
    table: Table
    served: Flags
    """[problems, kernels]: whether the kernel can serve the problem, timed or not."""
    imagined: Imagined

    @property
    def timed(self) -> list[int]:
        """Problems that any kernel was timed on."""
        return [i for i, row in enumerate(self.table.us) if not np.isnan(row).all()]


def size_of(problem: AttentionProblem) -> str:
    """The last word of the problem's class."""
    return class_of(problem).rpartition(" ")[2]


def all_work(
    kernels: list[Kernel], resident: list[int], problems: Sequence[tuple[AttentionProblem, GpuSpec]]
) -> Floats:
    """[kernels, problems, terms]."""
    return np.array(
        [
            [work_of(k.family, k.params, r, p, gpu) for p, gpu in problems]
            for k, r in zip(kernels, resident, strict=True)
        ]
    )


def imagine(
    drawn: list[AttentionProblem],
    timed: set[AttentionProblem],
    kernels: list[Kernel],
    resident: list[int],
    gpu: GpuSpec,
) -> Imagined:
    """Of the problems drawn at most IMAGINED of each class, none of them `timed`."""
    by_size: dict[str, list[AttentionProblem]] = {}
    for problem in drawn:
        of_size = by_size.setdefault(size_of(problem), [])
        if problem not in timed and len(of_size) < IMAGINED:
            of_size.append(problem)
    problems = [p for of_size in by_size.values() for p in of_size]
    seen = view(kernels, resident, [(known(p), gpu) for p in problems])
    return Imagined([size_of(p) for p in problems], *seen, able(problems, kernels, gpu))


def view(kernels: list[Kernel], resident: list[int], problems: Sequence[tuple[AttentionProblem, GpuSpec]]) -> View:
    """The problems' work and features, on a card each."""
    return View(all_work(kernels, resident, problems), scaled([features(p, gpu) for p, gpu in problems]))


def views(
    kernels: list[Kernel], resident: list[int], problems: Sequence[tuple[AttentionProblem, GpuSpec]]
) -> list[View]:
    """The problems as a choice sees them; none where that is as they are."""
    shown = [[(p, gpu) for p in visible(problem)] for problem, gpu in problems]
    same = all(seen == [one] for seen, one in zip(shown, problems, strict=True))
    return [] if same else [view(kernels, resident, column) for column in zip(*shown, strict=True)]


def able(problems: list[AttentionProblem], kernels: list[Kernel], gpu: GpuSpec) -> Flags:
    """[problems, kernels]: whether the kernel can serve the problem."""
    rows = [
        [not registry.lookup(k.family).why_impossible(p, k.config, gpu) and not hopeless(k.family, p) for k in kernels]
        for p in problems
    ]
    return np.array(rows)


def measured(group: Group, table: dict[str, Any], gpus: list[GpuSpec], drawn: list[AttentionProblem]) -> Measured:
    """The final table of a group; `gpus` are the cards of its rows, `drawn` what problems of it may be imagined."""
    us = np.array([[time or np.nan for time in row] for row in table["us"]], dtype=float)
    kernels = [group.kernels[k] for k in table["kernels"]]
    resident = [resident_blocks(k, group, gpus[0]) for k in kernels]
    problems = list(zip(group.problems, gpus, strict=True))
    (work, points), seen = view(kernels, resident, problems), views(kernels, resident, problems)
    units: dict[str, list[int]] = {}
    for column, kernel in enumerate(kernels):
        units.setdefault(campaign.source_of(kernel), []).append(column)
    us = without_stumbles(one_speed(us, work, [gpu.name for gpu in gpus]), work)
    made = Table(us, work, points, [k.family for k in kernels], list(units.values()), seen=seen)
    imagined = imagine(drawn, set(group.problems), kernels, resident, gpus[0])
    served = able(group.problems, kernels, gpus[0]) | ~np.isnan(us)
    return Measured(kernels, resident, [size_of(p) for p in group.problems], made, served, imagined)


def one_speed(us: Floats, work: Floats, cards: list[str]) -> Floats:
    """The times [problems, kernels] at the speed of the first row's card: those of each other card times the factor
    that makes constants fitted on the first right in the median. (Of one architecture, at other clocks.)"""
    first = [i for i, card in enumerate(cards) if card == cards[0]]
    made = us.copy()
    for card in sorted(set(cards) - {cards[0]}):
        rows = [i for i, other in enumerate(cards) if other == card]
        logs = []
        for column in range(us.shape[1]):
            timed = [i for i in first if not np.isnan(us[i, column])]
            if len(timed) >= FEWEST:
                predicted = work[column][rows] @ fit(work[column][timed], us[timed, column])
                logs.append(np.log(predicted / us[rows, column]))
        factor = float(np.exp(np.nanmedian(logs))) if logs else 1.0
        made[rows] *= factor
    return made


def without_stumbles(us: Floats, work: Floats) -> Floats:
    """The times [problems, kernels], NaN in place of those that are no kernel's."""
    made = us.copy()
    for column in range(us.shape[1]):
        timed = np.flatnonzero(~np.isnan(us[:, column]))
        if len(timed):
            predicted = work[column][timed] @ fit(work[column][timed], us[timed, column])
            made[timed[us[timed, column] > STUMBLE * predicted], column] = np.nan
    return made


def usual_of_plain(plain: dict[str, Measured]) -> dict[str, dict[str, Usual]]:
    """By bits and head_dim, what the constants of each family are in plain attention of both masks."""
    found: dict[str, dict[str, Usual]] = {}
    for dim in {head_dim_of(name) for name in plain}:
        tables = [m.table for name, m in plain.items() if head_dim_of(name) == dim]
        for family in {family for table in tables for family in table.families}:
            times = [table.times_of(family) for table in tables]
            found.setdefault(dim, {})[family] = usual(
                np.vstack([t[0] for t in times]), np.hstack([t[1] for t in times])
            )
    return found


def head_dim_of(name: str) -> str:
    """Bits and head_dim of a group."""
    return " ".join(name.split()[:2])
