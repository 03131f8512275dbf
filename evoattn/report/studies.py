"""The studies of a database for a terminal: one row each."""

from __future__ import annotations

from rich.console import Console

from evoattn.model.named_problems import short_name
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Trial
from evoattn.report.data import cost_text
from evoattn.report.text import add_row, make_table, print_text
from evoattn.storage import Storage


def print_studies(storage: Storage, console: Console) -> None:
    """Name, problem, GPU, trials, best and date of every study, oldest first. Raises `StorageError`."""
    table = make_table("")
    table.add_column("study", overflow="fold")
    table.add_column("problem", overflow="fold")
    table.add_column("gpu", no_wrap=True)
    table.add_column("trials", justify="right", no_wrap=True)
    table.add_column("best", justify="right", no_wrap=True)
    table.add_column("date", no_wrap=True)
    found = storage.studies()
    for study in found:
        trials = sum(storage.counts(study).values())
        leaders = storage.leaderboard(study, 1)
        name = short_name(AttentionProblem(**study.problem))
        problem = "" if study.name.startswith(name) else name  # most studies are named after their problem
        best = _best(study, leaders[0]) if leaders else "-"
        add_row(table, study.name, problem, study.gpu, trials, best, study.created_at[:10])
    if not found:
        console.print("There is no study in this database yet; start with `evoattn search`.")
        return
    console.print(table)
    if any(study.offline for study in found):
        print_text(console, "A relative cost orders the kernels of one problem and GPU; it is not a time.")


def _best(study: Study, leader: Trial) -> str:
    if study.offline or leader.timing is None:
        return f"cost {cost_text(leader.relative_cost)}"
    return f"{leader.timing.median_us:.2f} µs"
