"""`evoattn tune`: shapes of a file searched together."""

from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import errors


def tune(
    shapes: Annotated[
        Path,
        typer.Argument(metavar="SHAPES.json", help="What a model asks for, as `evoattn.capture` in Python saves it."),
    ],
    budget: Annotated[str, typer.Option(metavar="BUDGET", help="A time, such as 90s or 10m.")] = "5m",
) -> None:
    """Search kernels for what a model asks of attention.

    All problems are searched together on the first CUDA device; most of the time goes where the most time is spent.
    Winners are kept in the user's data folder, and `evoattn.attention` in Python takes them from then on."""
    with errors():
        from rich.console import Console

        from evoattn.ops.shapes import Shapes
        from evoattn.ops.tune import TuneProgress
        from evoattn.ops.tune import tune as search_all

        with Console(stderr=True).status("") as status:

            def show(progress: TuneProgress) -> None:
                status.update(
                    f"{progress.stage}, {progress.seconds:.0f} s of {budget}: {progress.compiled} kernels compiled, "
                    f"{progress.measured} times taken"
                )

            done = search_all(Shapes.load(shapes), budget, refresh=show)
        typer.echo(str(done))
