"""`evoattn calibrate` and `evoattn calibration`: what picks need of the card that is here, measured and kept."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import FAILED_RUN, Jobs, Output, console, errors, stop
from evoattn.model.errors import WrongUse
from evoattn.model.whole_file import write_file

app = typer.Typer(
    name="calibration", help="What `evoattn calibrate` has kept of cards.", no_args_is_help=True, rich_markup_mode=None
)
CHANGED = (
    "The cost model has changed since; the correction of before still counts, and "
    "`evoattn calibrate --budget 1m` fits it anew"
)
Card = Annotated[str, typer.Argument(metavar="CARD", help="As `evoattn calibration list` names it.")]


def calibrate(
    budget: Annotated[str, typer.Option(metavar="BUDGET", help="A time, such as 90s or 20m.")] = "20m",
    shapes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own problems, as `evoattn.capture` in Python saves them.")
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,…",
            help="Kinds of problems that are drawn, e.g. plain,packed.",
            show_default="what models use",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    jobs: Jobs = None,
) -> None:
    """Measure this GPU: evoattn then chooses faster kernels on it.

    Problems as people have them are searched together. Every time is kept as it is taken: a later run goes on.
    `evoattn.attention` then chooses among the kernels that were fast, and a table says how good such choices are for
    problems left out."""
    with errors():
        from evoattn.engine.budget import parse_budget
        from evoattn.model.gpu import detect_devices
        from evoattn.portfolio import calibrate as room
        from evoattn.portfolio.workload import DRAWS

        seconds = parse_budget(budget).seconds
        if seconds is None:
            raise WrongUse(f"calibrate takes a time such as 90s or 20m, not {budget!r}.")
        chosen = tuple(kinds.split(",")) if kinds else room.KINDS
        if unknown := [kind for kind in chosen if kind not in DRAWS]:
            raise WrongUse(f"There is no kind {unknown[0]!r} of problems, only {', '.join(DRAWS)}.")
        own = []
        if shapes:
            from evoattn.ops.shapes import Shapes

            own = [(one.problem, one.count * (one.us or 1.0)) for one in Shapes.load(shapes).entries]
        devices = [device for device in detect_devices() if device.spec]
        if not devices or devices[0].spec is None:
            stop("No CUDA device of sm_80 or newer is here: `evoattn calibrate` runs on the card itself.", FAILED_RUN)
        gpu, wanted = devices[0].spec, room.Wanted(seconds, chosen, own, jobs)
        if dry_run:
            typer.echo(room.plan(wanted, gpu).describe())
            return
        started, screen = time.monotonic(), console()

        def say(text: str) -> None:
            screen.print(f"{time.monotonic() - started:5.0f} s: {text}", markup=False)

        try:
            done = room.calibrate(wanted, gpu, say)
        except KeyboardInterrupt:
            stop("Interrupted. What was measured is kept: the same command goes on.", FAILED_RUN)
        typer.echo(done.table())
        typer.echo(f"Kept as {done.calibration.name}; evoattn.attention takes it from now on.")


@app.command("list")
def list_() -> None:
    """The cards that were calibrated."""
    with errors():
        from evoattn.portfolio.calibrations import Calibration, every

        found = list(every())
        if not found:
            typer.echo("No card was calibrated; `evoattn calibrate` does it.")
        for one in found:
            if not isinstance(one, Calibration):
                typer.echo(f"{one[0]}: cannot be read: {one[1]}")
                continue
            judged = one.judged
            words = f"{one.name}: {one.made}, {one.times} times, {len(one.listed.kernels)} kernels"
            if judged.get("regret"):
                words += f"; regret {judged['regret']:.3f} on {judged['problems']} problems"
                words += f", ahead of SDPA on {judged['ahead']} of {judged['beside']}"
            if old := one.why_old():
                words += f". {old}: `evoattn calibrate --budget 1m` times the best again"
            if one.model_changed:
                words += f". {CHANGED}"
            typer.echo(words)


@app.command()
def export(card: Card, output: Output = None) -> None:
    """Write a card's calibration as plain data, for others who have such a card."""
    with errors():
        from evoattn.portfolio.calibrations import named

        text = json.dumps(named(card).to_row()) + "\n"
        if output is None:
            typer.echo(text, nl=False)
        else:
            write_file(output, text)
            typer.echo(f"Wrote {output}.", err=True)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `evoattn calibration export` wrote.")],
) -> None:
    """Keep the calibration of a file. It holds configs, never sources, and kernels are checked before they answer."""
    with errors():
        from evoattn.portfolio.calibrations import bring_in

        found = bring_in(file)
        old = found.why_old()
        typer.echo(
            f"Kept {found.name}, {len(found.listed.kernels)} kernels"
            + (
                f"; {old}, so that they race PyTorch's attention until `evoattn calibrate` has timed them."
                if old
                else "."
            )
        )


@app.command()
def remove(card: Card) -> None:
    """Remove a card's calibration, with all of its times."""
    with errors():
        from evoattn.portfolio.calibrations import remove as take_away

        typer.echo(f"Removed {take_away(card)}.")
