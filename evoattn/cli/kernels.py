"""`evoattn export` and `evoattn reproduce`: a recorded kernel taken away, or run again."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoattn.cli.common import (
    FAILED_RUN,
    Database,
    GpuOfBest,
    ProblemOption,
    ShapeOption,
    StudyName,
    TrialWord,
    TrustSource,
    chosen,
    console,
    errors,
    write,
)
from evoattn.model.errors import WrongUse

if TYPE_CHECKING:
    from evoattn.model.records import Trial
    from evoattn.storage import Storage


class ExportFormat(StrEnum):
    """What `evoattn export` writes."""

    CHECK = "check"
    HEADER = "header"
    TORCH = "torch"


def export(
    trial: TrialWord,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write, or the folder of --format torch.",
            show_default="the terminal",
            metavar="PATH",
        ),
    ] = None,
    kind: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="`check`: a program that checks and times the kernel on its problem; `header`: the kernel with a "
            "`launch` for any lengths, batch, heads and strides; `torch`: a folder that torch builds into an op.",
        ),
    ] = ExportFormat.CHECK,
    study: StudyName = None,
    shape: ShapeOption = None,
    problem: ProblemOption = None,
    gpu: GpuOfBest = None,
    db: Database = None,
) -> None:
    """Write a recorded kernel for use without evoattn.

    One file that plain nvcc builds, or a PyTorch extension."""
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        if kind is ExportFormat.TORCH:
            from evoattn.export.header import export_torch, write_folder

            if output is None:
                raise WrongUse("--format torch writes a folder; name it with -o.")
            write_folder(export_torch(storage, record, output.resolve().name), output)
            typer.echo(f"Wrote {output}; its README.md says how to build it.", err=True)
        elif kind is ExportFormat.HEADER:
            from evoattn.export.header import export_header

            write(export_header(storage, record), output)
        else:
            from evoattn.export.check import export_source

            write(export_source(storage, record), output)
        _say_whose(storage, record)


def _say_whose(storage: Storage, record: Trial) -> None:
    """One sentence on stderr where the exported code is not what today's template gives."""
    from evoattn.model.problem import AttentionProblem
    from evoattn.search.recorded import source_finding

    study = storage.study(record.study_id)
    found = source_finding(record, AttentionProblem(**study.problem), study.spec)
    if not found.agrees:
        words = "What was exported is code of whoever wrote the database: read it before you build it."
        typer.echo(f"evoattn: {found.sentence} {words}", err=True)


def reproduce(
    trial: TrialWord,
    study: StudyName = None,
    shape: ShapeOption = None,
    problem: ProblemOption = None,
    gpu: GpuOfBest = None,
    trust_source: TrustSource = False,
    db: Database = None,
) -> None:
    """Run a recorded trial again.

    It is rendered, compiled, checked and timed anew, and compared with the record. Exit code 0 only if it reproduced.
    """
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        from evoattn.report.text import print_text
        from evoattn.search.reproduce import reproduce as run_again

        result = run_again(storage, record, storage.study(record.study_id), trust_source)
        screen = console()
        screen.print(f"Trial {record.number} ({record.family})")
        for finding in result.findings:
            mark = {True: "ok", False: "FAILED", None: "note"}[finding.agrees]
            print_text(screen, f"{finding.what:<8} {mark:<7} {finding.sentence}", indent="  ")
        screen.print("reproduced" if result.reproduced else "NOT reproduced")
        if not result.reproduced:
            raise typer.Exit(FAILED_RUN)
