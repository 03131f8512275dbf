"""`evoattn export` and `evoattn reproduce`: a recorded kernel taken away, or run again."""

from __future__ import annotations

from typing import Annotated

import typer

from evoattn.cli.common import (
    FAILED_RUN,
    Database,
    GpuOfBest,
    Output,
    ProblemOption,
    ShapeOption,
    StudyName,
    TrialWord,
    chosen,
    console,
    errors,
    write,
)


def export(
    trial: TrialWord,
    output: Output = None,
    study: StudyName = None,
    shape: ShapeOption = None,
    problem: ProblemOption = None,
    gpu: GpuOfBest = None,
    db: Database = None,
) -> None:
    """Write a recorded kernel to one .cu file.

    Plain nvcc builds it: the kernel as recorded, a check of its answer and a timing.
    """
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        from evoattn.export.check import export_source

        write(export_source(storage, record), output)


def reproduce(
    trial: TrialWord,
    study: StudyName = None,
    shape: ShapeOption = None,
    problem: ProblemOption = None,
    gpu: GpuOfBest = None,
    trust_source: Annotated[
        bool,
        typer.Option(
            "--trust-source",
            help="Run the recorded source even if today's template renders another: it is code, of whoever wrote the "
            "database.",
        ),
    ] = False,
    db: Database = None,
) -> None:
    """Run a recorded trial again.

    It is rendered, compiled, checked and timed anew, and compared with the record. Exit code 0 only if it reproduced.
    """
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        from evoattn.search.reproduce import reproduce as run_again

        result = run_again(storage, record, storage.study(record.study_id), trust_source)
        screen = console()
        screen.print(f"Trial {record.number} ({record.family})")
        for finding in result.findings:
            mark = {True: "ok", False: "FAILED", None: "note"}[finding.agrees]
            screen.print(f"  {finding.what:<8} {mark:<7} {finding.sentence}", markup=False)
        screen.print("reproduced" if result.reproduced else "NOT reproduced")
        if not result.reproduced:
            raise typer.Exit(FAILED_RUN)
