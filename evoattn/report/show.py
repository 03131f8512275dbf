"""One trial for a terminal: what is recorded of it, and its hardware counters beside those of a peer."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, KernelCounters, Profile, Study, Timing, Trial, ValidationReport
from evoattn.model.space import spelled
from evoattn.peers.labels import peer_label
from evoattn.profiling.ncu import COUNTERS, STALLED
from evoattn.report.data import CountersTable
from evoattn.report.text import add_row, clean, make_table, print_table, print_text
from evoattn.report.winner import fastest_peer
from evoattn.storage import Storage
from evoattn.timing.protocol import ENERGY

STALLS_SHOWN = 4
"""Of the reasons for which warps wait, those that are largest in any column."""
KERNELS_SHOWN = 2
"""Of each contestant, the longest: SDPA's math backend launches many."""


def counters_table(storage: Storage, study: Study, trial: Trial) -> CountersTable | None:
    """The counters of a trial beside those of the fastest peer that has some; None if the trial has none.

    Raises `StorageError` where the database fails."""
    ours = storage.profile(trial.number)
    if ours is None:
        return None
    theirs = _best_peer(storage, study, trial)
    columns = [(f"trial {trial.number}", kernel) for kernel in _longest(ours)]
    columns += [(peer_label(theirs.peer), kernel) for kernel in _longest(theirs)] if theirs else []
    names = [name for name in COUNTERS if any(name in kernel.counters for _, kernel in columns)]
    rows: list[tuple[str, tuple[float | None, ...]]] = [("time, µs", tuple(kernel.us for _, kernel in columns))]
    rows += [
        (name, tuple(kernel.counters.get(name) for _, kernel in columns))
        for name in (*names, *_stalls([kernel for _, kernel in columns]))
    ]
    note = (
        f"{ours.tool}, {ours.cache} L2; stalled: warps that wait for that reason, per issued instruction. "
        "The profiler runs each kernel alone, so its times are not those of a final."
    )
    return CountersTable(tuple(name for name, _ in columns), tuple(k.kernel for _, k in columns), tuple(rows), note)


def _best_peer(storage: Storage, study: Study, trial: Trial) -> Profile | None:
    profiles = storage.peer_profiles(study)
    measured = {name: timings for name, timings in storage.peers(study).items() if name in profiles}
    if fastest := fastest_peer(trial.timing, measured):
        return profiles[fastest.backend]
    return min(profiles.values(), key=lambda profile: sum(kernel.us for kernel in profile.kernels), default=None)


def _longest(profile: Profile) -> list[KernelCounters]:
    return sorted(profile.kernels, key=lambda kernel: -kernel.us)[:KERNELS_SHOWN]


def _stalls(kernels: list[KernelCounters]) -> list[str]:
    largest: dict[str, float] = {}
    for kernel in kernels:
        for name, value in kernel.counters.items():
            if name.startswith(STALLED):
                largest[name] = max(value, largest.get(name, 0.0))
    return sorted(largest, key=lambda name: -largest[name])[:STALLS_SHOWN]


Row = tuple[str, str]
"""A row without a name goes on with the one above it."""


def trial_rows(study: Study, trial: Trial, places: Iterable[dict[str, str]]) -> Iterator[Row]:
    """The rows of `trial`, of `study`; `places` are the versions and devices that it ran on."""
    yield "trial", f"{trial.number} of study {study.name} ({trial.created_at})"
    yield "problem", AttentionProblem(**study.problem).describe()
    device = "offline" if study.offline else study.versions.get("device", "unknown device")
    yield "gpu", f"{study.gpu} ({study.arch}), {device}"
    yield "state", f"{trial.state}" + (f": {trial.reason}" if trial.reason else "")
    yield "family", trial.family
    yield "config", spelled(trial.config)
    yield "config id", trial.config_id
    parents = f" of trials {', '.join(map(str, trial.parents))}" if trial.parents else ""
    yield "made by", f"{trial.operator}{parents}"
    if trial.compile_info:
        yield from _compile_rows(trial.compile_info)
    if trial.validation:
        yield from _check_rows(trial.validation)
    for timing in trial.timings:
        yield from _timing_rows(timing)
    if trial.disqualified:
        yield "DISQUALIFIED", trial.disqualified
    if trial.relative_cost is not None:
        yield "relative cost", f"{trial.relative_cost:.6g} (an estimate for ranking, not a time)"
    yield "evaluated in", f"{trial.seconds:.2f} s"
    yield "sampler", f"{study.sampler}, seed {study.seed}"
    name = "ran on"
    for place in places:
        yield name, _pairs(place)
        name = "timed again on"
    if name == "ran on":
        yield "study made on", _pairs(study.versions)
    yield "source hash", trial.source_hash or "none: it never became source"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _compile_rows(info: CompileInfo) -> Iterator[Row]:
    yield "compiler", f"{info.compiler} {' '.join(info.options)}, {info.seconds:.2f} s"
    yield (
        "resources",
        f"{info.registers} registers per thread, {info.spill_bytes} bytes spilled, {info.static_smem_bytes} bytes of "
        "static shared memory",
    )
    if info.warnings:
        yield "warnings", ", ".join(info.warnings)


def _check_rows(report: ValidationReport) -> Iterator[Row]:
    yield "validated on", report.backend
    for check in report.checks:
        verdict = "right" if check.passed else "WRONG"
        error = f"error {check.max_error:.2e}, allowed {check.allowed_error:.2e}"
        yield "", f"{verdict}  {check.case}: {error}, {check.seconds * 1e3:.1f} ms"
    if report.seed is not None:
        yield "inputs' seed", str(report.seed)


def _timing_rows(timing: Timing) -> Iterator[Row]:
    protocol = timing.protocol
    yield f"time ({protocol.get('stage', '?')})", _timing_sentence(timing)
    if "clocks" in protocol:
        yield "", _clocks_sentence(protocol["clocks"])
    for tool, verdict in (protocol.get("sanitizer") or {}).items():
        yield "", f"{tool}: {verdict}"


def _timing_sentence(timing: Timing) -> str:
    p = timing.protocol
    if not timing.samples_us:
        return f"none: {p.get('out')}"
    return (
        f"{timing.median_us:.2f} µs median of {len(timing.samples_us)} samples, 10-90 % {timing.quantile_us(0.1):.2f}-"
        f"{timing.quantile_us(0.9):.2f}; {p.get('calls_per_replay', '?')} calls per replay, {p.get('cache', '?')} L2, "
        f"{p.get('contestants', '?')} interleaved{_board_sentence(p)}"
    )


def _board_sentence(protocol: dict[str, Any]) -> str:
    """Of a final: the energy of a call, and the least and most of what was read in its rounds."""
    said = [f"{energy:.3g} mJ per call of the whole board"] if _is_number(energy := protocol.get(ENERGY)) else []
    for key, unit in (("sm_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "°C")):
        match protocol.get(key):
            case [low, high] if _is_number(low) and _is_number(high):
                said.append(f"{low:.0f}-{high:.0f} {unit}")
    return "".join(f"; {text}" for text in said)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number: a database may hold anything."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def _clocks_sentence(clocks: dict[str, Any]) -> str:
    """What NVML said of the device at the end of a timing."""
    if "absent" in clocks:
        return f"clocks not read: {clocks['absent']}"
    throttled = ", ".join(clocks.get("throttled_by") or ()) or "nothing"
    return (
        f"SM {clocks.get('sm_mhz', '?')} MHz, memory {clocks.get('memory_mhz', '?')} MHz, "
        f"{clocks.get('temperature_c', '?')} °C, {clocks.get('power_w', '?')} W, throttled by {throttled}"
    )


NAME_COLUMNS = 40
"""Names of peers' kernels are whole C++ types."""


def print_trial(storage: Storage, trial: Trial, console: Console, source: bool = False) -> None:
    """Print all that is recorded of `trial`; with `source` its CUDA source last."""
    study = storage.study(trial.study_id)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in trial_rows(study, trial, storage.environments(trial)):
        lines = str(text).split("\n")  # whatever a database holds in its place
        rows.add_row(name, Text("\n".join(map(clean, lines))))
    console.print(rows)
    if table := counters_table(storage, study, trial):
        print_counters(console, table)
    if not trial.source_hash:
        return
    if not source:
        print_text(console, f"`evoattn show {trial.number} --source` prints its source as well.")
        return
    text = storage.source(trial.source_hash)
    shown = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)  # nothing that a terminal would obey
    console.print()
    console.print(shown, markup=False, soft_wrap=True)


def print_counters(console: Console, counters: CountersTable) -> None:
    """Hardware counters, a column per kernel."""
    table = make_table()
    table.add_column("", no_wrap=True)
    for name in counters.columns:
        table.add_column(Text(clean(name)), justify="right")
    add_row(table, "kernel", *(name[:NAME_COLUMNS] for name in counters.kernels))
    for name, values in counters.rows:
        add_row(table, name, *("-" if value is None else f"{value:.4g}" for value in values))
    print_table(console, "Hardware counters", table)
    print_text(console, counters.note)
