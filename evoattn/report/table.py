"""The leaderboard of a study for a terminal, and with it all that `evoattn report --full` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoattn.report.data import StudySummary
from evoattn.report.details import print_details
from evoattn.report.rows import LeaderboardRow
from evoattn.report.screen import Kept, print_result
from evoattn.report.text import add_row, clean, cost_text, make_table, number, print_table, print_text

WIDE = 140
"""Columns from which the leaderboard also holds the resources and both percentiles; below, resources stand beside the
configs."""
RESOURCES = ("regs", "spill", "smem KiB")


def render_table(summary: StudySummary, console: Console, kept: Kept, full: bool = False) -> None:
    """Print the result on `console`, whose width all lines keep to; with `full` the long tables stand before it."""
    if full:
        print_text(console, f"Study {summary.study}: {summary.problem_text}, on {summary.gpu}", "bold")
        print_text(console, summary.provenance, "dim")
        if summary.notice:
            print_text(console, summary.notice, "yellow")
        console.print()
        _print_leaderboard(summary, console)
        print_details(summary, console)
        console.print()
    print_result(summary, console, kept)


def _print_leaderboard(summary: StudySummary, console: Console) -> None:
    if not summary.leaderboard:
        console.print("No candidate is right yet.")
        return
    wide = console.width >= WIDE
    print_table(console, _title(summary, wide), _leaderboard(summary, wide))
    if summary.verdict:
        print_text(console, summary.verdict)
    print_table(console, "Configs", _configs(summary.leaderboard, resources=not wide))


def _title(summary: StudySummary, wide: bool) -> str:
    if summary.kind == "estimated":
        return "Leaderboard by relative cost; nothing was timed"
    return "Leaderboard, µs per call" + ("" if wide else "; spread: 10th to 90th percentile over the median")


def _resources(row: LeaderboardRow) -> list[str]:
    """Registers per thread, bytes spilled, shared memory in KiB."""
    counts = ["-" if v is None else str(v) for v in (row.registers, row.spill_bytes)]
    return [*counts, "-" if row.smem_bytes is None else f"{row.smem_bytes / 1024:.1f}"]


def _spread(row: LeaderboardRow, wide: bool) -> str:
    """Both percentiles, or what lies between them as a share of the median."""
    if row.median_us is None or row.p10_us is None or row.p90_us is None:
        return "-"
    return f"{row.p10_us:.2f}-{row.p90_us:.2f}" if wide else f"{(row.p90_us - row.p10_us) / row.median_us:.1%}"


def _leaderboard(summary: StudySummary, wide: bool) -> Table:
    measured = summary.kind == "measured"
    backends = [b.backend for b in summary.baselines if any(b.backend in row.speedups for row in summary.leaderboard)]
    weighed = wide and any(row.energy_mj is not None for row in summary.leaderboard)
    if measured:
        spread = "10-90 %, µs" if wide else "spread"
        values = [
            "median",
            spread,
            "TFLOP/s",
            "peak",
            *(["mJ"] if weighed else []),
            *(f"×{clean(b)}" for b in backends),
        ]
    else:
        values = ["relative cost"]
    table = make_table()
    table.padding = (0, 1 if wide else 0, 0, 0)
    for name in ("#", "trial"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for name in (*values, *(RESOURCES if wide else ())):
        table.add_column(Text(name), justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    if measured and wide:
        table.add_column("timed in", no_wrap=True)
    for row in summary.leaderboard:
        if measured:
            middle = [
                number(row.median_us, 2),
                _spread(row, wide),
                number(row.tflops, 1),
                "-" if row.peak_share is None else f"{row.peak_share:.1%}",
                *([number(row.energy_mj, 2)] if weighed else []),
                *(number(row.speedups.get(b), 2) for b in backends),
            ]
        else:
            middle = [cost_text(row.relative_cost)]
        end = [row.state, row.stage] if measured and wide else [row.state]
        add_row(table, str(row.rank), str(row.trial), row.family, *middle, *(_resources(row) if wide else ()), *end)
    return table


def _configs(rows: tuple[LeaderboardRow, ...], resources: bool) -> Table:
    """What each row's config has of its own; what all rows of a family share is said once."""
    table = make_table()
    table.add_column("trial", justify="right", no_wrap=True)
    for name in RESOURCES if resources else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("config, and how it was made")
    for family in dict.fromkeys(row.family for row in rows):
        of_family = [row for row in rows if row.family == family]
        shared = {}
        if len(of_family) > 1:
            shared = {
                k: v
                for k, v in of_family[0].config.items()
                if all(k in r.config and r.config[k] == v for r in of_family)
            }
            blanks = [""] * len(RESOURCES) if resources else []
            add_row(table, "all", *blanks, f"{family}: {_genes(shared) or 'nothing in common'}")
        for row in of_family:
            own = {k: v for k, v in row.config.items() if k not in shared}
            add_row(
                table,
                str(row.trial),
                *(_resources(row) if resources else ()),
                f"{_genes(own)} ({row.operator})".strip(),
            )
    return table


def _genes(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in config.items())
