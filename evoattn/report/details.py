"""What `evoattn report --full` adds for a terminal: peers, failures, lineage, improvements and parameters."""

from __future__ import annotations

from rich.console import Console

from evoattn.report.data import StudySummary
from evoattn.report.parameters import GeneValue
from evoattn.report.text import add_row, cost_text, make_table, number, print_table, print_text
from evoattn.timing.peers.labels import peer_label

FAILURES_SHOWN = 12
PARAMETERS_SHOWN = 6
ANCESTORS_SHOWN = 8
IMPROVEMENTS_SHOWN = 12


def print_details(summary: StudySummary, console: Console) -> None:
    """Print what was learnt on the way; tables without a row that says something are left out."""
    _print_peers(summary, console)
    _print_failures(summary, console)
    counts = ", ".join(f"{count} {state}" for state, count in summary.counts.items())
    print_text(console, f"{summary.trials} trials: {counts or 'none'}.")
    for importance in summary.importances:
        if importance.shares:
            first = list(importance.shares.items())[:PARAMETERS_SHOWN]
            shares = ", ".join(f"{name} {share:.0%}" for name, share in first)
            print_text(console, f"What sets the best tenth of {importance.family} apart: {shares}.")
    if rank := summary.cost_model:
        print_text(
            console,
            f"The cost model ranked {rank.trials} measured trials with a Spearman correlation of "
            f"{rank.correlation:.3f}.",
        )
    _print_lineage(summary, console)
    _print_improvements(summary, console)
    _print_genes(summary, console)


def _print_peers(summary: StudySummary, console: Console) -> None:
    if not summary.baselines:
        return
    table = make_table()
    for name in ("peer", "µs", "p10-p90", "TFLOP/s"):
        table.add_column(name, justify="left" if name == "peer" else "right", no_wrap=True)
    table.add_column("timed in")
    for b in summary.baselines:
        if b.median_us is None:
            add_row(table, peer_label(b.backend), "-", "-", "-", f"refused: {b.refusal}")
        else:
            spread = f"{number(b.p10_us, 2)}-{number(b.p90_us, 2)}"
            add_row(table, peer_label(b.backend), number(b.median_us, 2), spread, number(b.tflops, 1), b.stage)
    print_table(console, "Peers on the same device", table)


def _print_failures(summary: StudySummary, console: Console) -> None:
    if not summary.failures:
        return
    table = make_table()
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("reason")
    for group in summary.failures[:FAILURES_SHOWN]:
        alike = f" (and {group.variants - 1} more that differ in numbers)" if group.variants > 1 else ""
        add_row(table, str(group.count), group.state, group.reason + alike)
    if rest := summary.failures[FAILURES_SHOWN:]:
        add_row(
            table, str(sum(g.count for g in rest)), "", f"{len(rest)} more kinds of failure: see --format json or html"
        )
    print_table(console, "Failures", table)


def _print_lineage(summary: StudySummary, console: Console) -> None:
    if len(summary.lineage) < 2:
        return
    measured = summary.kind == "measured"
    unit = "µs" if measured else "relative cost"
    table = make_table()
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("made by", no_wrap=True)
    table.add_column("parameters won")
    for a in summary.lineage[:ANCESTORS_SHOWN]:
        value = number(a.value, 2) if a.value is not None and measured else cost_text(a.value)
        changes = " ".join(f"{name} {old}→{new}" for name, (old, new) in a.changes.items())
        parents = f" of {', '.join(map(str, a.parents))}" if a.parents else ""
        add_row(table, str(a.trial), a.state if a.value is None else value, f"{a.operator}{parents}", changes)
    print_table(console, f"Lineage of the best (parameters that differ from its best parent; value in {unit})", table)


def _print_improvements(summary: StudySummary, console: Console) -> None:
    if summary.search_gain:
        print_text(console, summary.search_gain)
    if len(summary.improvements) < 2:
        return
    table = make_table()
    for name in ("after", "trial", "value", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("made by", no_wrap=True)
    table.add_column("parameters")
    for step in summary.improvements[: -IMPROVEMENTS_SHOWN - 1 : -1]:
        found = step.found
        value = number(found.value, 2) if summary.kind == "measured" else cost_text(found.value)
        gain = "-" if step.gain is None else f"{step.gain:.2%}"
        changes = " ".join(f"{name} {old}→{new}" for name, (old, new) in found.changes.items())
        add_row(table, f"{step.elapsed_s:.0f} s", str(found.trial), value, gain, found.operator, changes)
    print_table(
        console, "Improvements, the latest first (gain over the best before; parameters against the best parent)", table
    )


def _print_genes(summary: StudySummary, console: Console) -> None:
    """The winning value of each parameter, the one most frequent among the best, where the trials tell anything."""
    winners: dict[tuple[str, str], GeneValue] = {}
    for gene in summary.genes:
        winners.setdefault((gene.family, gene.gene), gene)
    telling = [gene for gene in winners.values() if gene.tells]
    if not telling:
        return
    table = make_table()
    for name in ("family", "parameter"):
        table.add_column(name, no_wrap=True)
    for name in ("best 5 %", "all", "effect", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    for gene in telling:
        effect = number(gene.effect, 3)
        shares = (f"{gene.top_share:.0%}", f"{gene.share:.0%}")
        add_row(table, gene.family, f"{gene.gene}={gene.value}", *shares, effect, str(gene.pairs))
    print_table(
        console, "Values that won (share among the best 5 % and among all; paired effect, under 1 is faster)", table
    )
