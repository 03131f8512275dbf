"""The studies of a database for a terminal."""

from __future__ import annotations

from rich.console import Console

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Trial
from evoattn.report.text import clean, cost_text, print_text
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
