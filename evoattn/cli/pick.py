"""Kernels for shapes: `evoattn pick`, the one that would run, and `evoattn tune`, those of a file searched together."""

from pathlib import Path
from typing import Annotated

import typer

from evoattn.cli.common import chosen_problem, console, errors, gpu_names, problem_names


def pick(
    gpu: Annotated[
        str, typer.Option(metavar="NAME", autocompletion=gpu_names, help="The GPU, or `auto` for the one that is here.")
    ] = "auto",
    shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="A shape, as for `evoattn search --shape`.")
    ] = None,
    problem: Annotated[
        str | None, typer.Option(metavar="NAME", help="A name of `evoattn problems`.", autocompletion=problem_names)
    ] = None,
) -> None:
    """Print the kernel that would run for a shape, and why.

    It is what your own `evoattn tune` or `evoattn search` kept for exactly this shape, else what the cost model chooses
    out of the kernels that were fast on such a card."""
    with errors():
        from evoattn.model.errors import WrongUse
        from evoattn.model.gpu import detect_devices
        from evoattn.model.quantize import QUANTIZE_OPERATIONS
        from evoattn.portfolio.pick import pick as choose
        from evoattn.portfolio.wins import Wins
        from evoattn.report.text import print_text
        from evoattn.search.request import choose_device

        wanted = chosen_problem(shape, problem)
        if wanted is None:
            raise WrongUse("Give --shape or --problem.")
        spec, _ = choose_device(gpu, detect_devices() if gpu == "auto" else [])
        asked = wanted.with_unknown_lengths()
        found = Wins().find(asked, spec) or choose(asked, spec)
        screen = console()
        screen.print(f"{wanted.describe()} on {spec.name}", markup=False)
        if found is None:
            print_text(
                screen,
                "PyTorch's own attention would run: no kernel can serve this, or it was faster than all of them. A "
                "search on such a card may still find one.",
            )
            return
        screen.print(f"{found.family}", markup=False)
        print_text(screen, found.config.describe())
        print_text(screen, f"Why: {found.why}.")
        if found.expected_regret is not None:
            lost = found.expected_regret - 1
            print_text(
                screen,
                f"Such kernels took {lost:.1%} longer than the best known, in the mean of problems left out for that.",
            )
        if found.estimated:
            raced = "Estimated: evoattn.attention runs it where it is faster than PyTorch in a race."
            alone = "Estimated: it runs all the same, as PyTorch has no kernel of 8 bits to race."
            print_text(screen, alone if asked.element.bytes == 1 or asked.op in QUANTIZE_OPERATIONS else raced)


def tune(
    shapes: Annotated[
        Path,
        typer.Argument(metavar="SHAPES.json", help="What a model asks for, as `evoattn.capture` in Python saves it."),
    ],
    budget: Annotated[str, typer.Option(metavar="BUDGET", help="A time, such as 90s or 10m.")] = "5m",
) -> None:
    """Search kernels for what a model asks of attention.

    All problems are searched together on the first CUDA device. Most of the budget goes to those that take the model
    the most time. Winners are kept in the user's data folder, and `evoattn.attention` in Python runs them from then
    on."""
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
