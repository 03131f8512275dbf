"""The result of a study on one screen: at most 24 lines of 80 columns."""

from dataclasses import dataclass

from rich.console import Console

from evoattn.model.paths import for_people
from evoattn.peers.labels import peer_label
from evoattn.report.data import Origin, PeerRatio, StudySummary, Winner
from evoattn.report.text import WIDEST, clean, command, cost_text, number, print_lines, print_text


@dataclass(frozen=True)
class Kept:
    """Where a study is kept, and which options make a command find it there."""

    database: str
    """Path or URL, for people."""
    db: str | None = None
    """The value of --db; None where a command finds the database without it."""
    study: str | None = None
    """The value of --study; None where it is the study that a command takes without it."""


def print_result(summary: StudySummary, console: Console, kept: Kept) -> None:
    """Print the best kernel, its config, how sure it is, where it is kept, and the commands that come next."""
    winner = summary.winner
    width = min(console.width, WIDEST)
    print_text(console, f"{summary.problem_text}, on {summary.gpu}")
    if winner is None:
        print_text(console, f"No candidate is right yet: {_counts(summary)}.")
        if summary.failures:
            print_text(console, f"Most often: {summary.failures[0].reason}", indent="  ")
        _print_place(summary, console, kept)
        print_lines(console, ["", "Next:", *command([*_words("report", kept), ["--full"]], width)])
        return
    _print_best(summary, winner, console)
    export = command([["evoattn", "export", "best"], *_found_by(kept), ["-o", "best.cu"]], width)
    page = command([*_words("report", kept), ["--format", "html"], ["-o", "report.html"]], width)
    if summary.kind == "estimated":
        _print_place(summary, console, kept)
        print_lines(console, ["", "Next:", *export, *page])
        print_lines(console, [f"On the {summary.gpu} itself these time it:", *_on_the_card(summary, winner, width)])
        return
    settings = [["--set", f"{name}={clean(value)}"] for name, value in winner.settings.items()]
    config = command([["--family", winner.row.family], *settings], width, any_order=True)
    print_lines(console, ["Its config, as options of `evoattn search`:", *config])
    _print_place(summary, console, kept)
    print_lines(console, ["", "Next:", *export, *page, f"  python: {_python(kept)}"])


def _on_the_card(summary: StudySummary, winner: Winner, width: int) -> list[str]:
    """Commands for the card itself: is the kernel right and how long does it take, what does a search find beside it
    and beside peers, who won."""
    shape = ["--shape", summary.problem_text]
    config = [[f"{name}={clean(value)}"] for name, value in winner.settings.items()]
    return [
        *command([["evoattn", "try", winner.row.family], *config, shape], width),
        *command([["evoattn", "search"], ["--budget", "10m"], shape], width),
        "  evoattn report",
    ]


def _found_by(kept: Kept) -> list[list[str]]:
    study = [["--study", kept.study]] if kept.study else []
    return [*study, *([["--db", kept.db]] if kept.db else [])]


def _words(name: str, kept: Kept) -> list[list[str]]:
    return [["evoattn", name], *_found_by(kept)]


def _python(kept: Kept) -> str:
    given = {"study": kept.study, "db": kept.db}
    words = "".join(f", {name}={value!r}" for name, value in given.items() if value)
    return f'import evoattn; kernel = evoattn.load("best"{words})'


def _print_best(summary: StudySummary, winner: Winner, console: Console) -> None:
    row = winner.row
    best = f"Best kernel: trial {row.trial} ({row.family})"
    if summary.kind == "estimated":
        print_text(console, f"{best}, relative cost {cost_text(row.relative_cost)}; never timed", "bold")
        if winner.origin and (text := _gain(winner.origin, measured=False)):
            print_text(console, text, indent="  ")
        print_text(console, "It orders kernels of one problem and GPU: it is not a time.", indent="  ")
        for said in winner.estimate:
            print_text(console, said, indent="  ")
        return
    rate = "" if row.tflops is None else f", {number(row.tflops, 1)} TFLOP/s"
    share = "" if row.peak_share is None else f" ({row.peak_share:.0%} of peak)"
    print_text(console, f"{best}, {number(row.median_us, 2)} µs{rate}{share}", "bold")
    print_text(console, _against_peer(winner.peer), indent="  ")
    print_text(console, _sureness(summary, winner), indent="  ")
    if winner.origin and (text := _gain(winner.origin, measured=True)):
        print_text(console, text, indent="  ")


def _against_peer(peer: PeerRatio | None) -> str:
    if peer is None:
        return "No peer was timed beside it."
    name = f"{peer_label(peer.backend)}, the fastest peer ({number(peer.median_us, 2)} µs)"
    if peer.tie:
        return f"A tie with {name}: {peer.speedup:.2f}× its speed, which the rounds do not tell from 1."
    return f"{peer.speedup:.2f}× the speed of {name}."


def _sureness(summary: StudySummary, winner: Winner) -> str:
    if winner.tied_with:
        rivals = ", ".join(map(str, winner.tied_with))
        return f"A tie with trial{'s' * (len(winner.tied_with) > 1)} {rivals}: the final does not tell them apart."
    if summary.final:
        return "No tie: it is ahead of every other finalist (sign test, 95 %)."
    return "How sure: not known, as no final compared it with others."


def _gain(origin: Origin, measured: bool) -> str:
    """Against the starting config that the winner came from."""
    if origin.gain is None or (measured and not origin.in_final):
        return ""
    what = "time" if measured else "relative cost"
    return f"Its {what} is {origin.gain:.1%} less than that of the best starting config, trial {origin.trial}."


def _counts(summary: StudySummary) -> str:
    tried = f"{summary.trials} trial{'s' * (summary.trials != 1)}"
    return tried + "".join(f", {count} {state}" for state, count in summary.counts.items())


def _print_place(summary: StudySummary, console: Console, kept: Kept) -> None:
    trial = f"trial {summary.winner.row.trial} of " if summary.winner else ""
    print_lines(console, [""])
    print_text(console, f"Kept: {trial}study {summary.study}")
    print_text(console, f"in {for_people(kept.database)}", indent="  ")
