"""`evoattn report`, `evoattn studies` and `evoattn show`: what was found."""

from __future__ import annotations

from io import StringIO
from typing import Annotated

import typer

from evoattn.cli.common import (
    PIPE_WIDTH,
    Database,
    GpuOfBest,
    Output,
    ProblemOption,
    ShapeOption,
    StudyName,
    StudyWord,
    TrialWord,
    chosen,
    console,
    errors,
    kept_in,
    named_study,
    opened,
    require_one_of,
    write,
)


def report(
    word: StudyWord = None,
    study: StudyName = None,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table, json or html.")] = "table",
    output: Output = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also the leaderboard, the peers, the failures, the lineage and the parameters."),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of the leaderboard.")] = 20,
    db: Database = None,
) -> None:
    """Show what a study found, and what to do next.

    The best kernel, how sure that is, where it is kept and the next commands, on one screen. --full adds the
    leaderboard and all that was learnt on the way; --format html writes a page of it with plots.
    """
    with errors():
        wanted = named_study(study, word)
        require_one_of("format", format, ("table", "json", "html"))
        with opened(db) as storage:
            from evoattn.report import render_html, render_json, render_table, summarise

            chosen_study = storage.chosen_study(wanted)
            summary = summarise(storage, chosen_study, limit, course=full or format != "table")
            kept = kept_in(storage, chosen_study, db)
            if format == "json":
                write(render_json(summary), output)
            elif format == "html":
                write(render_html(summary, kept.db), output)
            elif output:
                from rich.console import Console

                text = StringIO()
                render_table(summary, Console(file=text, width=PIPE_WIDTH), kept, full)
                write(text.getvalue(), output)
            else:
                render_table(summary, console(), kept, full)


def studies(db: Database = None) -> None:
    """List the studies of the database, the latest last."""
    with errors(), opened(db) as storage:
        from evoattn.report.table import print_studies

        print_studies(storage, console())


def show(
    trial: TrialWord,
    source: Annotated[bool, typer.Option("--source", help="Also its CUDA source.")] = False,
    study: StudyName = None,
    shape: ShapeOption = None,
    problem: ProblemOption = None,
    gpu: GpuOfBest = None,
    db: Database = None,
) -> None:
    """Show all that is recorded of one trial.

    Its config, state, evidence and lineage, and where it ran.
    """
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        from evoattn.report.show import print_trial

        print_trial(storage, record, console(), source)
