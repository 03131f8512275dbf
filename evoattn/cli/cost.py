"""`evoattn cost`: fit the cost model to measured times, and judge it on problems that a fit did not see."""

import os
from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import errors
from evoattn.model.errors import WrongUse

app = typer.Typer(
    name="cost", help="For contributors: the fit of the cost model.", no_args_is_help=True, rich_markup_mode=None
)
Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE…]",
        help="Measured times: reports/measurements/CARD.npz/CAMPAIGN, or what `evoattn portfolio measure` wrote.",
        show_default="all of the repository",
    ),
]
Each = Annotated[int, typer.Option(min=3, metavar="N", help="Times of a problem of a campaign in the fit.")]
Judged = Annotated[
    int | None, typer.Option(min=3, metavar="N", help="The same of those that are judged.", show_default="all")
]
Jobs = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes.", show_default="all cores")]


@app.command()
def fit(
    files: Files = None,
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Where the fit goes.", show_default="the shipped file")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Repeat the fit that ships, families that have later trees included.")
    ] = False,
    unjudged: Annotated[bool, typer.Option("--unjudged", help="Do not judge it: a fifth of the time.")] = False,
    family: Annotated[
        list[str] | None,
        typer.Option("--family", help="Fit this family alone, and keep the rest of the fit; may be given again."),
    ] = None,
    near: Annotated[
        bool,
        typer.Option("--near", help="Keep the fit, and add trees for kernels near the best of problems new to it."),
    ] = False,
    each: Each = 40,
    judged: Judged = None,
    jobs: Jobs = None,
) -> None:
    """Fit the cost model to measured times, and judge it by fits that leave problems out; needs no GPU.

    The file says what it was made from and how it was judged."""
    with errors():
        from evoattn.cost import fitted
        from evoattn.cost.training import experiments, rows

        if again and (files or family):
            raise WrongUse("Files or families are named, or the fit that ships is repeated with --again: not both.")
        if near and (again or family or not files):
            raise WrongUse("--near takes files that the fit has not seen, and no other way to fit.")
        paths = files or rows.files()
        path, cores = output or fitted.DATA, jobs or os.cpu_count() or 1

        def keep(found: fitted.Fitted) -> None:
            fitted.save(found, path)

        if again:
            experiments.fit_again(typer.echo, keep, each, 0 if unjudged else judged, cores)
        elif near:
            keep(experiments.fit_near(paths, typer.echo, cores))
        elif family:
            keep(experiments.fit_families(paths, family, typer.echo, each, cores, not unjudged))
        elif unjudged:
            keep(experiments.make_fit(paths, typer.echo, each, cores))
        else:
            experiments.fit_and_judge(paths, typer.echo, keep, each, judged, cores)
        typer.echo(f"{path} has {path.stat().st_size >> 10} KB.")


@app.command()
def judge(files: Files = None, each: Each = 40, judged: Judged = None, jobs: Jobs = None) -> None:
    """How well does the cost model order kernels of problems that it was not fitted to? Needs no GPU.

    Prints the tables of reports/cost_model.md, and writes no fit."""
    with errors():
        from evoattn.cost.training import experiments, rows

        cores = jobs or os.cpu_count() or 1
        experiments.fit_and_judge(files or rows.files(), typer.echo, None, each, judged, cores)
