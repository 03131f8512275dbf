"""Nsight Compute's command line (`ncu`) on one call, a kernel of ours or a peer, and what of its table is kept."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evoattn.families.built import BuiltKernel
from evoattn.model.errors import FailedRun
from evoattn.model.paths import ROOT
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import KernelCounters
from evoattn.timing.protocol import CacheMode

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats",
    "Occupancy", "LaunchStats",
)  # fmt: skip
"""Those that hold the counters of `evoattn.profiling.ncu`; each costs the kernel some replays."""
SECONDS = 180.0
"""A peer may compile for ten seconds, and each counter's replay restores memory."""
NOT_INSTALLED = "Nsight Compute (ncu) is not installed: it comes with the CUDA toolkit, and has to be on the PATH."
FORBIDDEN = (
    "This machine's driver keeps the GPU's counters to its administrator: run the command as root, or see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM."
)


class ProfileError(FailedRun):
    """There are no counters: its message is one sentence."""


@dataclass(frozen=True)
class Counted:
    """What ncu wrote."""

    csv: str
    """`--csv --page raw`: a row of names, a row of units, a row per kernel."""
    tool: str


Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command and waits for it. May raise `subprocess.TimeoutExpired`."""


def find() -> str | None:
    """Path of ncu: on the PATH, or where the toolkit puts it."""
    usual = Path("/usr/local/cuda/bin/ncu")
    return shutil.which("ncu") or (str(usual) if usual.exists() else None)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


def count(
    problem: AttentionProblem,
    contestant: BuiltKernel | str,
    cache: CacheMode,
    find: Callable[[], str | None] = find,
    run: Run = _run,
) -> Counted:
    """The counters of one call of a kernel, or of the peer of that name, on random inputs of `problem`.

    `find` gives the path of ncu, None if it is not installed. Raises `ProfileError` where there are no counters."""
    path = find()
    if path is None:
        raise ProfileError(NOT_INSTALLED)
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write_job(folder, problem, contestant)
        log = folder / "ncu.csv"
        command = [path, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        # The clocks stay as they are: other programs may share the board, and a time is taken elsewhere.
        command += ["--clock-control", "none", "--cache-control", "all" if cache == "cold" else "none"]
        command += ["--profile-from-start", "off", *(word for name in SECTIONS for word in ("--section", name))]
        command += [sys.executable, "-m", "evoattn.profiling.target", str(folder)]
        try:
            done = run(command)
        except subprocess.TimeoutExpired:
            raise ProfileError(f"ncu did not end within {SECONDS:.0f} s.") from None
        said = log.read_text(errors="replace", encoding="utf-8") if log.exists() else ""
    csv = said[said.find('"ID"') :] if '"ID"' in said else ""
    if done.returncode or not csv:
        raise ProfileError(why_none(done.returncode, said + done.stdout + done.stderr))
    return Counted(csv, f"ncu {_version(path, run)}")


def _write_job(folder: Path, problem: AttentionProblem, contestant: BuiltKernel | str) -> None:
    job: dict[str, Any] = {"problem": problem.to_dict()}
    if isinstance(contestant, str):
        job["peer"] = contestant
    else:
        job |= {"family": contestant.family.name, "params": contestant.config.params, "gpu": asdict(contestant.gpu)}
        (folder / "kernel.cubin").write_bytes(contestant.compiled.cubin)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")


def why_none(code: int, output: str) -> str:
    """A sentence out of what ncu and the program under it printed, where no counters came."""
    if "ERR_NVGPUCTRPERM" in output:
        return FORBIDDEN
    errors = re.findall(r"^==ERROR== (.+)", output, re.MULTILINE)
    lines = [line for line in output.strip().splitlines() if not line.startswith("==")]
    last = (lines or errors or ["no output"])[-1]
    return f"ncu read no counters (exit code {code}): {last.strip()[:200].rstrip('.')}."


def _version(path: str, run: Run) -> str:
    found = re.search(r"Version (\d[\w.]*)", run([path, "--version"]).stdout)
    return found[1] if found else "unknown"


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
