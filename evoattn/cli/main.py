"""The command line: search, bench, report, show, export, reproduce, gpus, families."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from evoattn import __version__
from evoattn.model.paths import default_database

app = typer.Typer(
    name="evoattn",
    help="Evolutionary search for the fastest attention kernel on the GPU and the shapes that you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
WRONG_USE, FAILED_RUN = 2, 1
DEFAULT_DATABASE = default_database()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evoattn {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


Database = Annotated[str, typer.Option("--db", help="SQLAlchemy URL or path of the database.", envvar="EVOATTN_DB")]
StudyName = Annotated[str | None, typer.Option("--study", help="Name of the study.")]


def _stop(sentence: str, code: int) -> NoReturn:
    shown = "".join(c if c.isprintable() else " " for c in sentence)  # it may quote a database
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"evoattn: {shown}")
    raise typer.Exit(code)


@contextmanager
def _errors() -> Iterator[None]:
    """Every error that a user can meet becomes one sentence on stderr: exit code 2 for wrong use, 1 for a failed run."""
    from evoattn.families.registry import FamilyError
    from evoattn.model.errors import FailedRun, WrongUse
    from evoattn.model.gpu import GpuError
    from evoattn.model.problem import ProblemError
    from evoattn.model.space import ConfigError
    from evoattn.search.budget import BudgetError
    from evoattn.storage import StorageError, UnknownRecord

    try:
        yield
    except (BudgetError, ConfigError, FamilyError, GpuError, ProblemError, UnknownRecord, WrongUse) as error:
        _stop(str(error), WRONG_USE)
    except (FailedRun, StorageError) as error:
        _stop(str(error), FAILED_RUN)
    except OSError as error:
        _stop(f"{error.strerror or error}: {error.filename or 'a file'}.", FAILED_RUN)


def _console() -> Console:
    """Terminals tell their width; pipes and files get room for a whole table row."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


@app.command()
def search(
    gpu: Annotated[
        str, typer.Option(help="GPU to search for (see `evoattn gpus`), or `auto` for the one that is here.")
    ] = "auto",
    budget: Annotated[str, typer.Option(help="A time (90s, 30m, 2h) or a count (500trials).")] = "10m",
    problem: Annotated[
        str | None, typer.Option(help="A problem of search_spaces/problems.yaml.", show_default="seed_h100")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Or a shape: B=1,H=16,S=1024,D=64,dtype=fp16,mask=full (also Hkv, Sq, Sk, layout and lse)."),
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="Search only this family; may be given several times.")
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=V1,V2", help="Search only these values of a parameter; may be given several times."
        ),
    ] = None,
    starting_configs: Annotated[
        bool,
        typer.Option(
            "--starting-configs/--no-starting-configs", help="Begin with the known-good configs, or with random ones."
        ),
    ] = True,
    sampler: Annotated[str | None, typer.Option(help="genetic, tpe or random.", show_default="genetic")] = None,
    study: StudyName = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampler.", show_default="0")] = None,
    db: Database = DEFAULT_DATABASE,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile processes.", show_default="all cores")] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="`warm` keeps the inputs in L2 between calls, `cold` flushes it before each.", show_default="warm"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the study (by --study, else the latest).")
    ] = False,
    sanitize: Annotated[
        bool,
        typer.Option(
            "--sanitize", help="Run compute-sanitizer on the finalists; who fails memcheck leaves the leaderboard."
        ),
    ] = False,
) -> None:
    """Search for the fastest kernel and print the leaderboard. Ctrl-C ends it with all that was found."""
    with _errors():
        from evoattn.cli.run import run_search
        from evoattn.search.setup import prepare_search

        console = _console()
        prepared = prepare_search(
            gpu=gpu,
            budget=budget,
            problem=problem,
            shape=shape,
            families=family or [],
            sampler=sampler,
            study=study,
            seed=seed,
            db=db,
            jobs=jobs or os.cpu_count() or 1,
            cache=cache,
            resume=resume,
            sanitize=sanitize,
            choices=choice or [],
            starting_configs=starting_configs,
        )
        run_search(prepared, console)


@app.command()
def report(
    study: Annotated[str | None, typer.Argument(help="Name of the study.", show_default="the latest")] = None,
    format: Annotated[str, typer.Option("--format", help="table, json or html.")] = "table",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write.", show_default="the terminal")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of the leaderboard.")] = 20,
    db: Database = DEFAULT_DATABASE,
) -> None:
    """The leaderboard, the failures with their reasons, and (html) the search's progress, parameter importance and roofline."""
    if format not in ("table", "json", "html"):
        _stop(f"The format is one of table, json and html, not {format!r}.", WRONG_USE)
    with _errors(), _opened(db) as storage:
        from evoattn.report import render_html, render_json, render_table, summarise

        summary = summarise(storage, storage.chosen_study(study), limit)
        if format == "table":
            if output:
                with output.open("w") as file:
                    render_table(summary, Console(file=file, width=160))
            else:
                render_table(summary, _console())
            return
        text = render_json(summary) if format == "json" else render_html(summary)
        _write(text, output)


@app.command()
def bench(
    problems: Annotated[list[str], typer.Argument(help="Names of problems.yaml, or shapes as for `search --shape`.")],
    gpu: Annotated[str, typer.Option(help="The GPU that must be here, or `auto`.")] = "auto",
    db: Annotated[
        list[str] | None,
        typer.Option(
            help="Databases; may be given several times. The first takes new trials.", show_default="the usual one"
        ),
    ] = None,
    configs: Annotated[
        Path | None, typer.Option(help="Further configs, as scripts/best_configs.py writes them.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Kernels of ours in each final.")] = 4,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile processes.", show_default="all cores")] = None,
    format: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write.", show_default="the terminal")
    ] = None,
) -> None:
    """The best recorded kernels of each problem (else its starting configs) beside every installed peer, proved before and after."""
    if format not in ("table", "json"):
        _stop(f"The format is one of table and json, not {format!r}.", WRONG_USE)
    with _errors():
        from evoattn.bench.session import run_bench
        from evoattn.bench.table import render_rows, rows_json

        urls = db or [default_database()]
        rows = run_bench(
            problems, gpu, urls, configs, top, jobs or os.cpu_count() or 1, Console(stderr=True, highlight=False)
        )
        if format == "json":
            _write(rows_json(rows), output)
        elif output:
            with output.open("w") as file:
                render_rows(rows, Console(file=file, width=200))
        else:
            render_rows(rows, _console())


@app.command()
def show(
    trial: Annotated[str, typer.Argument(help="Number of the trial, or `best`.")],
    study: StudyName = None,
    db: Database = DEFAULT_DATABASE,
) -> None:
    """All that is recorded of one trial: config, state, evidence, lineage and source."""
    with _errors(), _opened(db) as storage:
        from evoattn.report.show import print_trial

        print_trial(storage, _chosen_trial(storage, trial, study), _console())


@app.command()
def export(
    trial: Annotated[str, typer.Argument(help="Number of the trial, or `best`.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write.", show_default="standard output")
    ] = None,
    study: StudyName = None,
    db: Database = DEFAULT_DATABASE,
) -> None:
    """One .cu file that plain nvcc builds: the recorded kernel, a check of its answer and a timing."""
    with _errors(), _opened(db) as storage:
        from evoattn.export.check import export_source

        _write(export_source(storage, _chosen_trial(storage, trial, study)), output)


@app.command()
def reproduce(
    trial: Annotated[str, typer.Argument(help="Number of the trial, or `best`.")],
    study: StudyName = None,
    trust_source: Annotated[
        bool,
        typer.Option(
            "--trust-source",
            help="Run the recorded source even if today's template renders another: it is code, of whoever wrote the database.",
        ),
    ] = False,
    db: Database = DEFAULT_DATABASE,
) -> None:
    """Render, recompile, validate and time a trial again; exit code 0 only if it reproduced."""
    with _errors(), _opened(db) as storage:
        from evoattn.search.reproduce import reproduce as run_again

        record = _chosen_trial(storage, trial, study)
        result = run_again(storage, record, storage.study(record.study_id), trust_source)
        console = _console()
        console.print(f"Trial {record.number} ({record.family})")
        for finding in result.findings:
            mark = {True: "ok", False: "FAILED", None: "note"}[finding.agrees]
            console.print(f"  {finding.what:<8} {mark:<7} {finding.sentence}", markup=False)
        console.print("reproduced" if result.reproduced else "NOT reproduced")
        if not result.reproduced:
            raise typer.Exit(FAILED_RUN)


@app.command()
def gpus() -> None:
    """The GPUs that evoattn knows, and what is in this machine."""
    from evoattn.model.gpu import GPUS, detect_devices

    table = Table(title="GPUs")
    for name in (
        "name",
        "product",
        "arch",
        "SMs",
        "smem/block",
        "fp16 TFLOP/s",
        "fp32 TFLOP/s",
        "DRAM GB/s",
        "L2 MB",
        "here",
    ):
        table.add_column(name, justify="left" if name in ("name", "product", "arch", "here") else "right")
    devices = detect_devices()
    for spec in GPUS.values():
        here = ", ".join(f"device {d.index}" for d in devices if d.spec is spec)
        table.add_row(
            spec.name,
            spec.product,
            spec.arch,
            str(spec.sm_count),
            f"{spec.smem_per_block:,}",
            f"{spec.peak_tflops('fp16'):.0f}",
            f"{spec.peak_tflops('fp32'):.0f}",
            f"{spec.dram_gb_per_s:.0f}",
            str(spec.l2_bytes >> 20),
            here,
        )
    console = _console()
    console.print(table)
    for device in devices:
        if device.spec is None:
            console.print(f"Device {device.index} is a {device.product}, which is not in the table.", markup=False)
    if not devices:
        console.print("No CUDA device in this machine: a search runs offline, on the interpreter.")


@app.command()
def families() -> None:
    """The kernel families and the size of their search spaces."""
    from evoattn.families.registry import FAMILIES
    from evoattn.model.gpu import GPUS
    from evoattn.model.space import load_space

    with _errors():
        table = Table(title="Families")
        for name in ("family", "what it is", "devices", "dtypes", "parameters", "points"):
            table.add_column(name, justify="right" if name in ("parameters", "points") else "left")
        for name, family in FAMILIES.items():
            space = load_space(name, GPUS["h100"])
            table.add_row(
                name,
                family.summary,
                family.devices,
                ", ".join(family.dtypes),
                str(len(space.parameters)),
                f"{space.size:,}",
            )
        _console().print(table)


@contextmanager
def _opened(db: str) -> Iterator:
    """The database of an existing search."""
    from evoattn.storage import Storage

    storage = Storage.open(db, create=False)
    try:
        yield storage
    finally:
        storage.close()


def _number(text: str) -> int:
    from evoattn.storage import UnknownRecord

    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise UnknownRecord(f"{text!r} is not the number of a trial; the leaderboard of `evoattn report` shows them.")
    return int(text)


def _chosen_trial(storage, text: str, study: str | None):
    """The trial called `text`; `best` is the leader of the study (by name, else the latest)."""
    from evoattn.storage import UnknownRecord

    if text != "best":
        return storage.trial(_number(text))
    chosen = storage.chosen_study(study)
    leaders = storage.leaderboard(chosen, 1)
    if not leaders:
        raise UnknownRecord(f"There is no best trial yet: study {chosen.name} has none that is right.")
    return leaders[0]


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text)
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"Wrote {output}.")


def main() -> None:
    """Entry point of the `evoattn` command."""
    app()


if __name__ == "__main__":
    main()
