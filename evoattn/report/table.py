"""The summary for a terminal, 100 columns and wider."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoattn.report.data import StudySummary, cost_text
from evoattn.report.rows import LeaderboardRow
from evoattn.timing.peers.labels import peer_label

FAILURES_SHOWN = 12
PARAMETERS_SHOWN = 6
ANCESTORS_SHOWN = 8
IMPROVEMENTS_SHOWN = 12
WIDE = 140
"""Columns from which the leaderboard also holds the resources and both percentiles; below, resources stand beside the configs."""


def _clean(value: Any) -> Text:
    """Text from the database without markup and without anything that a terminal would obey."""
    return Text("".join(c if c.isprintable() else " " for c in str(value)))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def render_table(summary: StudySummary, console: Console) -> None:
    """Print the summary on `console`, whose width the tables keep to."""
    console.print(_clean(f"Study {summary.study}: {summary.problem_text}, on {summary.gpu}"), style="bold")
    console.print(_clean(summary.provenance), style="dim")
    if summary.notice:
        console.print(_clean(summary.notice), style="yellow")
    console.print()
    if summary.leaderboard:
        wide = console.width >= WIDE
        console.print(_leaderboard(summary, wide))
        if summary.verdict:
            console.print(_clean(summary.verdict))
        console.print(_configs(summary.leaderboard, resources=not wide))
    else:
        console.print("No candidate is right yet.")
    if summary.baselines:
        console.print(_baselines(summary))
    if summary.failures:
        console.print(_failures(summary))
    counts = ", ".join(f"{count} {state}" for state, count in summary.counts.items())
    console.print(_clean(f"{summary.trials} trials: {counts or 'none'}."))
    for importance in summary.importances:
        if importance.shares:
            shares = ", ".join(
                f"{name} {share:.0%}" for name, share in list(importance.shares.items())[:PARAMETERS_SHOWN]
            )
            console.print(_clean(f"What sets the best tenth of {importance.family} apart: {shares}."))
    if rank := summary.cost_model:
        console.print(
            f"The cost model ranked {rank.trials} measured trials with a Spearman correlation of {rank.correlation:.3f}."
        )
    _print_lineage(summary, console)
    _print_improvements(summary, console)
    _print_genes(summary, console)


def _table(title: str, tight: bool = False) -> Table:
    padding = (0, 0) if tight else (0, 1, 0, 0)
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=padding, pad_edge=False
    )


RESOURCES = ("regs", "spill", "smem KiB")


def _resources(row: LeaderboardRow) -> list[str]:
    """Registers a thread, bytes spilled, shared memory in KiB."""
    counts = ["-" if v is None else str(v) for v in (row.registers, row.spill_bytes)]
    return [*counts, "-" if row.smem_bytes is None else f"{row.smem_bytes / 1024:.1f}"]


def _spread(row: LeaderboardRow, wide: bool) -> str:
    """Both percentiles, or what lies between them as a share of the median."""
    if row.median_us is None:
        return "-"
    return f"{row.p10_us:.2f}-{row.p90_us:.2f}" if wide else f"{(row.p90_us - row.p10_us) / row.median_us:.1%}"


def _leaderboard(summary: StudySummary, wide: bool) -> Table:
    measured = summary.kind == "measured"
    spread = "10-90 %, µs" if wide else "spread"
    unit = ", µs a call" + ("" if wide else "; spread: 10th to 90th percentile over the median")
    table = _table("Leaderboard" + (unit if measured else " by relative cost; nothing was timed"), tight=not wide)
    backends = [b.backend for b in summary.baselines if any(b.backend in row.speedups for row in summary.leaderboard)]
    if measured:
        values = ["median", spread, "TFLOP/s", "peak", *(f"×{_clean(b)}" for b in backends)]
    else:
        values = ["relative cost"]
    for name in ("#", "trial"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for name in (*values, *(RESOURCES if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    if measured and wide:
        table.add_column("timed in", no_wrap=True)
    for row in summary.leaderboard:
        if measured:
            middle = [
                _number(row.median_us, 2),
                _spread(row, wide),
                _number(row.tflops, 1),
                "-" if row.peak_share is None else f"{row.peak_share:.1%}",
                *(_number(row.speedups.get(b), 2) for b in backends),
            ]
        else:
            middle = [cost_text(row.relative_cost)]
        end = [row.state, _clean(row.stage)] if measured and wide else [row.state]
        table.add_row(
            str(row.rank), str(row.trial), _clean(row.family), *middle, *(_resources(row) if wide else ()), *end
        )
    return table


def _configs(rows: tuple[LeaderboardRow, ...], resources: bool) -> Table:
    """What each row's config has of its own; what all rows of a family share is said once."""
    table = _table("Configs")
    table.add_column("trial", justify="right", no_wrap=True)
    for name in RESOURCES if resources else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("config, and how it was made", overflow="fold")
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
            table.add_row("all", *blanks, _clean(f"{family}: {_genes(shared) or 'nothing in common'}"))
        for row in of_family:
            own = {k: v for k, v in row.config.items() if k not in shared}
            table.add_row(
                str(row.trial),
                *(_resources(row) if resources else ()),
                _clean(f"{_genes(own)} ({row.operator})".strip()),
            )
    return table


def _genes(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in config.items())


def _baselines(summary: StudySummary) -> Table:
    table = _table("Peers on the same device")
    for name in ("peer", "µs", "p10-p90", "TFLOP/s", "timed in"):
        table.add_column(name, justify="left" if name in ("peer", "timed in") else "right")
    for b in summary.baselines:
        if b.median_us is None:
            table.add_row(_clean(peer_label(b.backend)), "-", "-", "-", _clean(f"refused: {b.refusal}"))
        else:
            spread = f"{_number(b.p10_us, 2)}-{_number(b.p90_us, 2)}"
            table.add_row(
                _clean(peer_label(b.backend)), _number(b.median_us, 2), spread, _number(b.tflops, 1), _clean(b.stage)
            )
    return table


def _failures(summary: StudySummary) -> Table:
    table = _table("Failures")
    table.add_column("count", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for group in summary.failures[:FAILURES_SHOWN]:
        alike = f" (and {group.variants - 1} more that differ in numbers)" if group.variants > 1 else ""
        table.add_row(str(group.count), group.state, _clean(group.reason + alike))
    if rest := summary.failures[FAILURES_SHOWN:]:
        table.add_row(
            str(sum(g.count for g in rest)), "", f"{len(rest)} more kinds of failure: see --format json or html"
        )
    return table


def _print_lineage(summary: StudySummary, console: Console) -> None:
    if len(summary.lineage) < 2:
        return
    unit = "µs" if summary.kind == "measured" else "relative cost"
    table = _table(f"Lineage of the best (genes that differ from its best parent; value in {unit})")
    table.add_column("trial", justify="right")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("made by", no_wrap=True)
    table.add_column("genes won", overflow="fold")
    for a in summary.lineage[:ANCESTORS_SHOWN]:
        value = f"{a.value:.2f}" if a.value is not None and summary.kind == "measured" else cost_text(a.value)
        changes = " ".join(f"{name} {old}→{new}" for name, (old, new) in a.changes.items())
        parents = f" of {', '.join(map(str, a.parents))}" if a.parents else ""
        table.add_row(
            str(a.trial), a.state if a.value is None else value, _clean(f"{a.operator}{parents}"), _clean(changes)
        )
    console.print(table)


def _print_improvements(summary: StudySummary, console: Console) -> None:
    if summary.search_gain:
        console.print(_clean(summary.search_gain))
    if len(summary.improvements) < 2:
        return
    table = _table("Improvements, the latest first (gain over the best before; genes against the best parent)")
    for name in ("after", "trial", "value", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("made by", no_wrap=True)
    table.add_column("genes", overflow="fold")
    for step in summary.improvements[: -IMPROVEMENTS_SHOWN - 1 : -1]:
        found = step.found
        value = _number(found.value, 2) if summary.kind == "measured" else cost_text(found.value)
        gain = "-" if step.gain is None else f"{step.gain:.2%}"
        changes = " ".join(f"{name} {old}→{new}" for name, (old, new) in found.changes.items())
        table.add_row(f"{step.elapsed_s:.0f} s", str(found.trial), value, gain, _clean(found.operator), _clean(changes))
    console.print(table)


def _print_genes(summary: StudySummary, console: Console) -> None:
    """The winning value of each gene: the one most frequent among the best."""
    winners = {}
    for gene in (gene for gene in summary.genes if gene.tells):
        winners.setdefault((gene.family, gene.gene), gene)
    if not winners:
        return
    table = _table("Genes that won (share among the best 5 % and among all; median paired effect, under 1 is faster)")
    for name in ("family", "gene"):
        table.add_column(name, no_wrap=True)
    for name in ("best 5 %", "all", "effect", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    for gene in winners.values():
        table.add_row(
            _clean(gene.family),
            _clean(f"{gene.gene}={gene.value}"),
            f"{gene.top_share:.0%}",
            f"{gene.share:.0%}",
            _number(gene.effect, 3),
            str(gene.pairs),
        )
    console.print(table)
