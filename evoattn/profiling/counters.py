"""ncu's table of raw counters, and what of it is kept."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping

from evoattn.model.profile import KernelCounters
from evoattn.profiling.ncu import ProfileError

COUNTERS: dict[str, tuple[str, ...]] = {
    "SM busy, % of peak": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "tensor cores, % of peak": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "memory busy, % of peak": ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",),
    "DRAM, % of peak": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",),
    "L2, % of peak": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "L2 hits, %": ("lts__t_sector_hit_rate.pct",),
    "occupancy, %": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "instructions per cycle": ("sm__inst_executed.avg.per_cycle_active",),
    "registers per thread": ("launch__registers_per_thread",),
}
"""What is kept, in words, and ncu's names for it, the first choice first: GPUs differ in what they count."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
"""Warps that wait for a reason, per issued instruction."""
STALLED = "stalled: "
TIME = "gpu__time_duration.sum"
PER_US = {"ns": 1e3, "nsecond": 1e3, "us": 1.0, "usecond": 1.0, "ms": 1e-3, "msecond": 1e-3, "s": 1e-6, "second": 1e-6}
"""ncu's units of time: how many are a µs."""


def parse(text: str) -> tuple[KernelCounters, ...]:
    """The kernels of ncu's `--csv --page raw`, in the order that they ran. Raises `ProfileError`."""
    rows = list(csv.reader(io.StringIO(text)))
    if len(rows) < 3 or TIME not in rows[0] or "Kernel Name" not in rows[0]:
        raise ProfileError("ncu wrote a table that evoattn cannot read: it has no kernel, or no time.")
    names, units = rows[0], dict(zip(rows[0], rows[1]))
    kernels = [dict(zip(names, row)) for row in rows[2:] if len(row) == len(names)]
    return tuple(_kernel(row, units) for row in kernels)


def _kernel(row: Mapping[str, str], units: Mapping[str, str]) -> KernelCounters:
    found = {
        words: value
        for words, choices in COUNTERS.items()
        if (value := next((v for v in (_number(row.get(name, "")) for name in choices) if v is not None), None))
        is not None
    }
    stalls = {m[1]: _number(value) for name, value in row.items() if (m := STALL.fullmatch(name))}
    found |= {f"{STALLED}{reason.replace('_', ' ')}": value for reason, value in stalls.items() if value}
    time, unit = _number(row[TIME]), units[TIME]
    if time is None or unit not in PER_US:
        raise ProfileError(f"ncu wrote a time that evoattn cannot read: {row[TIME]!r} {unit}.")
    return KernelCounters(row["Kernel Name"], time / PER_US[unit], found)


def _number(text: str) -> float | None:
    """None for `n/a` and other words, and for what is not finite."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
