"""Studies for a terminal: a list of them, the result of one, with `--full` what was learnt on the way, or two of one
problem side by side."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Trial
from evoattn.model.space import spelled, spelling
from evoattn.peers.labels import peer_label
from evoattn.report.data import GeneValue, LeaderboardRow, StudySummary
from evoattn.report.screen import Kept, print_result
from evoattn.report.text import add_row, clean, cost_text, make_table, number, print_table, print_text
from evoattn.storage import Storage


def print_studies(storage: Storage, console: Console) -> None:
    """Name, trials, best, date, GPU and problem of every study, the latest last. Raises `StorageError`."""
    found = storage.studies()
    for study in found:
        trials = sum(storage.counts(study).values())
        leaders = storage.leaderboard(study, 1)
        best = _best(study, leaders[0]) if leaders else "none right yet"
        print_text(console, f"{clean(study.name)}: {trials} trial{'s' * (trials != 1)}, best: {best}", "bold")
        kind = " (offline)" if study.offline else ""
        problem = AttentionProblem(**study.problem).with_().describe()
        print_text(console, f"{study.created_at[:10]}, {study.gpu}{kind}, {problem}", indent="  ")
    if not found:
        print_text(console, "There is no study in this database yet; start with `evoattn search`.")
    elif any(study.offline for study in found):
        console.print()
        print_text(console, "A relative cost orders the kernels of one problem and GPU; it is not a time.")


def _best(study: Study, leader: Trial) -> str:
    if study.offline or leader.timing is None:
        return f"relative cost {cost_text(leader.relative_cost)} (trial {leader.number})"
    return f"{leader.timing.median_us:.2f} µs (trial {leader.number})"


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
            said = b.refusal if b.refusal.startswith("Refused") else f"refused: {b.refusal}"
            add_row(table, peer_label(b.backend), "-", "-", "-", said)
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
        changes = _changes(a.changes)
        parents = f" of {', '.join(map(str, a.parents))}" if a.parents else ""
        add_row(table, str(a.trial), a.state if a.value is None else value, f"{a.operator}{parents}", changes)
    print_table(console, f"Lineage of the best (parameters that differ from its best parent; value in {unit})", table)


def _changes(pairs: dict[str, tuple[Any, Any]]) -> str:
    return " ".join(f"{name} {spelling(old)}→{spelling(new)}" for name, (old, new) in pairs.items())


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
        changes = _changes(found.changes)
        add_row(table, f"{step.elapsed_s:.0f} s", str(found.trial), value, gain, found.operator, changes)
    print_table(
        console, "Improvements, the latest first (gain over the best before; parameters against the best parent)", table
    )


def _print_genes(summary: StudySummary, console: Console) -> None:
    """The winning value of each parameter, the one most frequent among the best, where the trials tell anything."""
    winners: dict[tuple[str, str], GeneValue] = {}
    for gene in summary.genes:
        winners.setdefault((gene.family, gene.gene), gene)
    telling = [gene for gene in winners.values() if gene.tells and (gene.effect is None or gene.effect < 1)]
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
        add_row(table, gene.family, f"{gene.gene}={spelling(gene.value)}", *shares, effect, str(gene.pairs))
    print_table(
        console, "Values that won (share among the best 5 % and among all; paired effect, under 1 is faster)", table
    )


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
            add_row(table, "all", *blanks, f"{family}: {spelled(shared) or 'nothing in common'}")
        for row in of_family:
            own = {k: v for k, v in row.config.items() if k not in shared}
            add_row(
                table,
                str(row.trial),
                *(_resources(row) if resources else ()),
                f"{spelled(own)} ({row.operator})".strip(),
            )
    return table


@dataclass(frozen=True)
class Comparison:
    """What both tables and the JSON say. A row is its name and the texts of both studies."""

    problem: str
    studies: tuple[str, str]
    verdict: str
    rows: tuple[tuple[str, str, str], ...]


def compare(one: StudySummary, other: StudySummary) -> Comparison:
    """Raises `WrongUse` where the two cannot be compared."""
    if AttentionProblem(**one.problem).with_() != AttentionProblem(**other.problem).with_():
        raise _unlike(one, other, f"are of two problems, {one.problem_text} and {other.problem_text}")
    if one.kind != other.kind:
        raise _unlike(one, other, f"have no common measure: one is {one.kind}, the other {other.kind}")
    if one.kind == "estimated" and one.gpu != other.gpu:
        raise _unlike(one, other, f"are estimated for two GPUs ({one.gpu}, {other.gpu}), each by a measure of its own")
    if one.winner is None or other.winner is None:
        raise _unlike(one, other, "do not both have a right kernel yet")
    mine, theirs = _facts(one), _facts(other)
    rows = tuple((name, mine.get(name, "-"), theirs.get(name, "-")) for name in mine | theirs)
    ours, others = _value(one), _value(other)
    how = "takes" if one.kind == "measured" else "costs"
    verdict = f"The best of {other.study} {how} {others / ours:.3g} times what that of {one.study} does."
    note = " They were not timed in turns." if one.kind == "measured" else ""
    return Comparison(one.problem_text, (one.study, other.study), verdict + note, rows)


def _unlike(one: StudySummary, other: StudySummary, why: str) -> WrongUse:
    return WrongUse(f"The studies {one.study} and {other.study} {why}: they cannot be compared.")


def _value(summary: StudySummary) -> float:
    row = summary.leaderboard[0]
    return (row.median_us if summary.kind == "measured" else row.relative_cost) or float("nan")


def _facts(summary: StudySummary) -> dict[str, str]:
    winner, row = summary.winner, summary.leaderboard[0]
    facts = {
        "GPU": summary.versions.get("device", summary.gpu),
        "date": summary.created_at[:10],
        "trials": str(summary.trials),
        "best trial": str(row.trial),
        "family": row.family,
    }
    if summary.kind == "measured":
        facts |= {"median µs": number(row.median_us, 2), "TFLOP/s": number(row.tflops, 1)}
        facts["of peak"] = "-" if row.peak_share is None else f"{row.peak_share:.1%}"
        if winner and winner.peer:
            facts["fastest peer"] = f"{peer_label(winner.peer.backend)}, {winner.peer.median_us:.2f} µs"
            facts["times its speed"] = f"{winner.peer.speedup:.2f}"
    else:
        facts["relative cost"] = cost_text(row.relative_cost)
    return facts | {name: spelling(value) for name, value in row.config.items()}


def comparison_json(found: Comparison) -> str:
    """The fields of `Comparison` as JSON, with a line break at the end."""
    return json.dumps(asdict(found), indent=1, ensure_ascii=False) + "\n"


def print_comparison(found: Comparison, console: Console) -> None:
    """The verdict and a column per study; parameters that both best kernels share stay in the table."""
    table = make_table()
    table.add_column("")
    for name in found.studies:
        table.add_column(Text(clean(name)))
    for row in found.rows:
        add_row(table, *row)
    print_table(console, found.problem, table)
    print_text(console, found.verdict)
