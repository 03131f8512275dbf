"""`evoattn profile`: hardware counters of a recorded kernel."""

from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import (
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
)
from evoattn.model.whole_file import write_file


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
        from evoattn.report.counters import counters_table
        from evoattn.report.show import print_counters
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
