"""One trial for people: config, state, evidence, lineage, source."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoattn.model.records import Trial
from evoattn.report.counters import CountersTable, counters_table
from evoattn.report.text import add_row, clean, make_table, print_table, print_text
from evoattn.report.trial_rows import trial_rows
from evoattn.storage import Storage

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
