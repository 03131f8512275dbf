"""One kernel: `evoattn try`, each step of a config's evaluation; `export`, `reproduce` and `profile` of a recorded
one."""

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
    chosen_problem,
    console,
    errors,
    family_names,
    gpu_names,
    print_plainly,
    problem_names,
    write,
)
from evoattn.model.errors import WrongUse
from evoattn.model.whole_file import write_file

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


def attempt(
    family: Annotated[
        str,
        typer.Argument(
            metavar="FAMILY", help="Name of the family (see `evoattn families`).", autocompletion=family_names
        ),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=V]...",
            help="Values of its parameters (see `evoattn families FAMILY`); the others come from a starting config.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE", help="A shape, as for `evoattn search --shape`.", show_default="B=1,H=16,S=1024,D=64"
        ),
    ] = None,
    problem: Annotated[
        str | None, typer.Option(metavar="NAME", help="A name of `evoattn problems`.", autocompletion=problem_names)
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=gpu_names, help="GPU to compile for, or auto for the one that is here."
        ),
    ] = "auto",
    source: Annotated[bool, typer.Option("--source", help="Also print the CUDA source.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not run it on the device here: for another GPU than that one.")
    ] = False,
) -> None:
    """Try one config: a family of kernels with values of parameters.

    It says why the config cannot be; or what the compiler says, with registers and spills; whether it is right on the
    interpreter, and which element is wrong first; its relative cost; and where a CUDA device is, the same on it and
    the time. Exit code 0 if it is right. Nothing is recorded."""
    with errors():
        from evoattn.families import registry
        from evoattn.model import gpu as gpus
        from evoattn.model.shape_text import parse_shape
        from evoattn.search.request import DEFAULT_SHAPE, choose_device

        chosen = registry.lookup(family)
        wanted = chosen_problem(shape, problem) or parse_shape(DEFAULT_SHAPE)
        spec, device = choose_device(gpu, gpus.detect_devices(), offline)
        print_plainly(f"{chosen.name} for {wanted.describe()} on the {spec.product}")

        from evoattn.report.text import print_lines, print_text
        from evoattn.search.attempt import attempt as steps_of
        from evoattn.search.attempt import fill_in, settings

        filled, screen = fill_in(chosen, values or [], wanted, spec), console()
        if filled.given:
            print_text(screen, f"given: {settings(filled.given)}", indent="  ")
        if filled.added:
            print_text(screen, f"filled in from {filled.source}: {settings(filled.added)}", indent="  ")
        right = True
        for step in steps_of(chosen, filled, wanted, spec, device is not None):
            right = right and step.agrees is not False
            mark = {True: "ok", False: "FAILED", None: "note"}[step.agrees]
            print_text(screen, f"{step.what:<12}{mark:<8}{step.sentence}", indent="  ")
            print_lines(screen, step.log.splitlines())
        if source:
            from evoattn.families.render import render

            screen.print()
            screen.print(render(chosen, wanted, filled.config, spec).source, markup=False, soft_wrap=True)
        if not right:
            raise typer.Exit(FAILED_RUN)


def profile(
    trial: TrialWord,
    peer: Annotated[
        str | None,
        typer.Option("--peer", metavar="NAME", help="Peer to set beside it.", show_default="the fastest of its final"),
    ] = None,
    raw: Annotated[
        Path | None, typer.Option("--raw", metavar="FOLDER", help="Folder for ncu's own tables, as CSV.")
    ] = None,
    trust_source: TrustSource = False,
    study: StudyName = None,
    shape: ShapeOption = None,
    problem: ProblemOption = None,
    gpu: GpuOfBest = None,
    db: Database = None,
) -> None:
    """Read hardware counters of a recorded kernel with ncu.

    ncu is Nsight Compute on the command line. It tells how busy tensor cores and memory are, occupancy, and what warps
    wait for, of the kernel and of a peer. The counters are kept; `show` and the page of `report` print them too."""
    with errors(), chosen(db, trial, study, shape, problem, gpu) as (storage, record):
        from evoattn.report.show import counters_table, print_counters
        from evoattn.search.profiled import profile_trial

        its_study = storage.study(record.study_id)
        screen = console()
        for found in profile_trial(storage, record, its_study, peer, trust_source):
            if isinstance(found, str):
                typer.echo(f"evoattn: {found}", err=True)
            elif raw:
                raw.mkdir(parents=True, exist_ok=True)
                write_file(raw / f"{found.profile.peer or f'trial{record.number}'}.csv", found.csv)
        if table := counters_table(storage, its_study, record):
            print_counters(screen, table)
