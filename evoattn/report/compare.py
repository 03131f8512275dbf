"""Two studies of one problem side by side: on two cards, or of two dates."""

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import spelling
from evoattn.peers.labels import peer_label
from evoattn.report.data import StudySummary
from evoattn.report.text import add_row, clean, cost_text, make_table, number, print_table, print_text


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
