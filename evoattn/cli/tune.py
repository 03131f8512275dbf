"""`evoattn tune`: shapes of a file searched together."""

from __future__ import annotations

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
    Winners are kept in the user's data folder, and `evoattn.attention` in Python takes them from then on.
    """
    with errors():
        from evoattn.ops.shapes import Shapes
        from evoattn.ops.tune import tune as search_all

        typer.echo(str(search_all(Shapes.load(shapes), budget)))
