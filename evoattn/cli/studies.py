"""What was found: `evoattn report`, `studies` and `show`, `dashboard` while a search runs, `db` for whole databases."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    print_plainly,
    require_one_of,
    write,
)
from evoattn.model.errors import WrongUse

if TYPE_CHECKING:
    from evoattn.report.data import StudySummary


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
    both: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare", metavar="A B", help="Two studies of one problem, by name, side by side.", show_default=False
        ),
    ] = None,
    db: Database = None,
) -> None:
    """Show what a study found, and what to do next.

    The best kernel, how sure that is, where it is kept and the next commands, on one screen. --full adds the
    leaderboard and all that was learnt on the way; --format html writes a page of it with plots."""
    with errors():
        wanted = named_study(study, word)
        require_one_of("format", format, ("table", "json", "html"))
        with opened(db) as storage:
            from evoattn.report import render_html, render_json, render_table, summarise

            if both:
                if wanted:
                    raise WrongUse("Give a study, or two with --compare, not both.")
                _compare(
                    [summarise(storage, storage.chosen_study(name), 1, course=False) for name in both], format, output
                )
                return
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


def _compare(both: list[StudySummary], format: str, output: Path | None) -> None:
    from evoattn.report.table import compare, comparison_json, print_comparison

    found = compare(both[0], both[1])
    if format == "table" and output is None:
        print_comparison(found, console())
    elif format == "table":
        from rich.console import Console

        text = StringIO()
        print_comparison(found, Console(file=text, width=PIPE_WIDTH))
        write(text.getvalue(), output)
    else:
        from evoattn.report.page import comparison_html

        write(comparison_json(found) if format == "json" else comparison_html(found), output)


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

    Its parameters, what became of it, its checks and times, the trials that it was bred from, and where it ran."""
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        from evoattn.report.show import print_trial

        print_trial(storage, record, console(), source)


def dashboard(
    word: StudyWord = None,
    study: StudyName = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Address to listen on.")] = "127.0.0.1",
    refresh: Annotated[
        float, typer.Option("--refresh", min=0.5, metavar="SECONDS", help="How often new trials are read.")
    ] = 5.0,
    db: Database = None,
) -> None:
    """Show a study in a browser with optuna-dashboard.

    History, importances, parallel coordinates, every trial with its source. It follows a search that is running. The
    database is only read: what is changed in the browser is not kept. Ctrl-C ends it."""
    with errors(), opened(db) as storage:
        from evoattn.dashboard.serve import Dashboard, listen, serve

        chosen = storage.chosen_study(named_study(study, word))
        shown = Dashboard(storage, chosen)
        server = listen(shown, host, port)
        print_plainly(
            f"Study {chosen.name}, {shown.trials} trials shown: http://{host}:{server.server_port}/dashboard/studies/0",
            "Ctrl-C ends it.",
        )
        serve(shown, server, refresh)


DatabaseArgument = Annotated[str, typer.Argument(metavar="FROM", help="SQLAlchemy URL or path of the database.")]

databases = typer.Typer(help="Move whole databases.", no_args_is_help=True, rich_markup_mode=None)


@databases.callback()
def _group() -> None:
    pass


@databases.command("copy")
def copy(
    source: DatabaseArgument,
    target: Annotated[str, typer.Argument(metavar="TO", help="URL or path of a new one, or of an empty one.")],
) -> None:
    """Copy a database to another one: a file to a PostgreSQL server, or back.

    Numbers of trials stay the same. The target has to be empty, and holds everything or nothing at the end."""
    with errors():
        from evoattn.storage import Storage
        from evoattn.storage.copying import copy_database

        reader = Storage.open(source, create=False)
        try:
            writer = Storage.open(target)
            try:
                copied = copy_database(reader, writer)
                said = ", ".join(f"{name} {count}" for name, count in copied.items() if count)
                typer.echo(f"Copied to {writer.place}: {said or 'no rows'}.")
            finally:
                writer.close()
        finally:
            reader.close()
