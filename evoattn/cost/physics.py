"""The physical part of the cost: each launch's terms in µs, put together as units that work beside one another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, mul

from evoattn.cost.fitted import Weights
from evoattn.cost.launch_time import LaunchTerms, launch_terms
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec

UNITS = ("tensor", "fp32", "special", "issue", "shared", "l2")
PARTS = (*UNITS, "dram", "chain", "fetch", "ends", "launches")
BESIDE = 3.0
"""Exponent of the norm by which busy units, waits and memory make one time: 1 would add them up, and a large one would
leave the longest."""
FLOOR = 16.0
"""Exponent of the norm by which memory's bandwidth bounds a corrected time."""
OVERLAPPED_SHARE = 0.5
"""Of a launch's fixed time that is left where it may begin before the launch before it has ended."""


@dataclass
class Physics:
    """All launches of a call, and what they take."""

    works: tuple[LaunchWork, ...]
    terms: tuple[LaunchTerms, ...]
    us: float
    parts: dict[str, float]
    """µs of each term by itself, over all launches, by the names of `PARTS`. They run beside one another, so that they
    add up to more than `us`."""
    memory_us: float
    """What the bytes that L2 does not hold take at the memory's whole bandwidth: no kernel is faster."""

    def corrected(self, factor: float) -> float:
        """`us` times a fitted factor, but never below `memory_us`: a smooth maximum, which keeps the order."""
        least = max(self.memory_us, 1e-9)
        return math.pow(math.pow(self.us * factor / least, FLOOR) + 1.0, 1 / FLOOR) * least


def physics(works: Sequence[LaunchWork], gpu: GpuSpec, weights: Weights) -> Physics | None:
    """The launches' times in µs, added up; None if no block of one fits on an SM."""
    found = [launch_terms(work, gpu) for work in works]
    terms = [t for t in found if t is not None]
    if len(terms) < len(works):
        return None
    us_per_clock, total, summed = 1e-3 / gpu.boost_clock_ghz, 0.0, [0.0] * len(PARTS)
    units = [us_per_clock * weights.units[name] for name in UNITS]
    dram = weights.units["dram"] / gpu.dram_gb_per_s / 1e3
    for work, t in zip(works, terms, strict=True):
        chain, fetch = t.chain * us_per_clock * weights.chain, t.fetch * us_per_clock * weights.fetch
        busy = [t.tensor, t.fp32, t.special, t.issue, t.shared, t.l2]
        busy = [*map(mul, busy, units), t.dram_bytes * dram]
        ends = t.ends * us_per_clock * weights.ends
        launch = weights.launch_us * (OVERLAPPED_SHARE if work.overlaps else 1.0)
        beside = sum([x**BESIDE for x in busy]) + (chain + fetch) ** BESIDE
        total += beside ** (1 / BESIDE) + ends + launch
        summed = [*map(add, summed, (*busy, chain, fetch, ends, launch))]
    parts = dict(zip(PARTS, summed))
    memory = sum(t.least_dram_bytes for t in terms) / gpu.dram_gb_per_s / 1e3
    return Physics(tuple(works), tuple(terms), total, parts, memory)
